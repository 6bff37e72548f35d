"""Simulation of a run on a cluster by discrete events, for `ludus plan --cluster`."""
