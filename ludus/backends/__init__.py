"""What samples and trains, behind one protocol."""
