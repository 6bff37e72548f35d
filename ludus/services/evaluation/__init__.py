"""Evaluation service: scores outputs over HTTP."""
