"""The code inside the jail: the standard library only, for ludus is not visible there."""
