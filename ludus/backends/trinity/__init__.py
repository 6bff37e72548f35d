"""Trinity-RFT as a host, in the process of `ludus train`."""
