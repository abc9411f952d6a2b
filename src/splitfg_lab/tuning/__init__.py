"""``splitfg tune``: reading data of any kind, training with checkpoints, and the report.

This package does not import torch; its modules do.
"""
