// Requests for data. The token comes with the address (#token=...) and stays in this browser.

const KEY = "ludus-view-token";

let token = "";
try {
  token = localStorage.getItem(KEY) ?? "";
} catch {
  token = "";
}

export function keepToken(given) {
  token = given;
  try {
    localStorage.setItem(KEY, given);
  } catch {
    // a browser that stores nothing keeps it until the page is left
  }
}

export class Failure extends Error {
  constructor(status, kind, message) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

function address(path, query) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") found.append(name, one);
    }
  }
  const text = found.toString();
  return `/api/${path}${text ? `?${text}` : ""}`;
}

async function failed(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // an answer of another program
  }
  return new Failure(answer.status, error.type ?? "http", error.message ?? `the server answered ${answer.status}`);
}

export async function get(path, query = {}, signal = undefined) {
  let answer;
  try {
    answer = await fetch(address(path, query), { headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "offline", "the server does not answer: is `ludus view` still running?");
  }
  if (!answer.ok) throw await failed(answer);
  return answer.json();
}

/** Follows server-sent events until `signal` aborts; connects again after an interruption. */
export async function follow(query, signal, hear) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      const answer = await fetch(address("events", query), { headers: headers(), signal });
      if (!answer.ok) throw await failed(answer);
      hear("open", null);
      wait = 500;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        rest += value;
        const parts = rest.split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const name = /^event: (.*)$/m.exec(part);
          const data = /^data: (.*)$/m.exec(part);
          if (name && data) hear(name[1], JSON.parse(data[1]));
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return;
    }
    if (signal.aborted) return;
    hear("closed", null);
    await new Promise((resume) => setTimeout(resume, wait));
    wait = Math.min(wait * 2, 10000);
  }
}
