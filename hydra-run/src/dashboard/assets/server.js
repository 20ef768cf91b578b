// Requests to the server. The token is in the fragment of the address and is kept in the session storage of this tab.

const named = new URLSearchParams(location.hash.slice(1));
if (named.has("token")) {
  sessionStorage.setItem("token", named.get("token"));
  named.delete("token");
  history.replaceState(null, "", named.size ? `#${named}` : location.pathname);
}

export const hasToken = () => sessionStorage.getItem("token") !== null;

const path = (run, what = "") => `/api/runs/${encodeURIComponent(run)}${what}`;

async function json(response) {
  const value = await response.json().catch(() => ({ error: `the server answered with status ${response.status}` }));
  if (!response.ok) throw new Error(value.error);
  return value;
}

export const runs = async () => json(await fetch("/api/runs"));
export const whole = async (run) => json(await fetch(path(run)));
export const timeline = async (run) => json(await fetch(path(run, "/timeline")));
export const reportOf = (run) => path(run, "/report");

async function post(run, what, request) {
  const headers = { "content-type": "application/json", "x-hydra-token": sessionStorage.getItem("token") ?? "" };
  return json(await fetch(path(run, what), { method: "POST", headers, body: JSON.stringify(request) }));
}

/** The text with which the model of a task continues a prompt. */
export const textOf = (run, request) => post(run, "/generate", request);

/** Sends a command to a run and returns its reply, which arrives once the command has taken effect. */
export async function command(run, request) {
  const reply = await post(run, "/control", request);
  if (!reply.ok) throw new Error(reply.error);
  return reply;
}

/** Follows a run from an offset in its log. `begin` is called when another run has replaced it in its directory. */
export function follow(run, from, { news, begin, lost, back }) {
  const events = new EventSource(path(run, `/events?from=${from}`));
  events.addEventListener("news", (event) => news(JSON.parse(event.data)));
  events.addEventListener("begin", begin);
  events.addEventListener("error", lost);
  events.addEventListener("open", back);
  return events;
}
