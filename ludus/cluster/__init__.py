"""Ray clusters: start and stop them over ssh, run recipes on them as jobs.

hosts      the schema of HOSTS.yaml
shell      a command on a host, over ssh or here
node       the part that runs on each host: `python -m ludus.cluster.node`
manage     up, down, status: all hosts together
jobs       Ray's job API: submit, logs, attach, stop
shipping   the files that a recipe refers to
entry      the program of a job: `python -m ludus.cluster.entry`
"""
