"""Trainer modes. Each says where things run and when weights move; none has a loop of its own."""
