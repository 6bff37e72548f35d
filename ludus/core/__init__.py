"""Carriers, errors, registry, configuration, metrics: what every other floor stands on."""
