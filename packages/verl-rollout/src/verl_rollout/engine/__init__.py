"""Inference engines, as they are seen inside the process that hosts one. Import them from their own modules."""
