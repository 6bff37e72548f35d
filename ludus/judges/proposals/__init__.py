"""Proposals of a curriculum agent: parsing, votes on their answers, rewards, and the filter."""
