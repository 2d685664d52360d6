"""Predictions: what the times of a real run say about other kills."""
