"""Examines an installation: packages against what they ask for, plug-ins against their contracts, and the machine."""
