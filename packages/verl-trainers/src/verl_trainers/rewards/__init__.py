"""Rewards: functions, and the processes that run them under a limit that is enforced."""
