"""Environments whose engine runs in a Java virtual machine."""
