"""Policy workers: the ranks that hold the weights, compute log-probs and losses, and send weights away."""
