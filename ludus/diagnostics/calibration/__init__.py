"""Calibrates a first recipe by measurement, for `ludus init`.

subject      an environment, or the rows of a data set
episodes     of the expert, and of random actions
tokens       the tokenizer that fits them, and their lengths
trials       short SFT and RL
choices      from measurements to values
warnings     what the measurements foretell
calibrate    all of it
recipe       the commented file
agents       subject, episodes, warnings, calibrate, recipe of a user's agent, which plays with a
             pretrained model
"""
