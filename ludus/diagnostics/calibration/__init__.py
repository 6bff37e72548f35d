"""Calibrates a first recipe by measurement, for `ludus init`.

subject      an environment, or the rows of a data set
episodes     of the expert, and of random actions
tokens       the tokenizer that fits them, and their lengths
trials       short SFT and RL
choices      from measurements to values
warnings     what the measurements foretell
calibrate    all of it
recipe       the commented file

agent_subject, agent_episodes, agent_warnings, agent, agent_recipe
             the same for an agent of the user, which plays with a pretrained model
"""
