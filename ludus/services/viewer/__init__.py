"""`ludus view`: a web page that shows runs, live steps and rollouts; it reads and never writes."""
