"""A program that walks to a goal with the model of an OpenAI-compatible API. Standard library only.

    ludus train recipes/agent-tiny-command.yaml

It starts for each episode, so it speaks HTTP on a bare socket: http.client takes longer to import
than all else takes. Guide: docs/command-agents.md.
"""

import json
import os
import socket

from walk import Walk

address, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
host, _, port = address.rpartition(":")
request = f"""\
POST /{path}/chat/completions HTTP/1.0
Host: {address}
Authorization: Bearer {os.environ["OPENAI_API_KEY"]}
Content-Type: application/json
Content-Length: """


def chat(messages: list[dict[str, str]]) -> dict[str, str]:
    """The model's next message."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    head = f"{request}{len(body)}\n\n".replace("\n", "\r\n")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}{body}".encode())
        reply = connection.makefile("rb").read()  # HTTP/1.0: until the server closes
    status, _, answer = reply.partition(b"\r\n\r\n")
    if status.split()[1] != b"200":
        raise SystemExit(answer.decode())
    return json.loads(answer)["choices"][0]["message"]


with open(os.environ["LUDUS_TASK"]) as file:
    walk = Walk(json.load(file)["data"])
messages: list[dict[str, str]] = []
while not walk.done:
    messages.append({"role": "user", "content": walk.view()})
    message = chat(messages)
    messages.append({"role": "assistant", "content": message["content"]})
    walk.move(message["content"] or "")
with open("outcome.json", "w") as file:
    json.dump({"reward": walk.reward, "success": walk.reward == 1}, file)
