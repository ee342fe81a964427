"""Evaluation: acceptance and speed through the real decoding path, and the report for people."""
