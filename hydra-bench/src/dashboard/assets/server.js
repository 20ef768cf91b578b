// What the server has, and what it is asked for. The token comes with the address, behind the #, and stays in this tab.

const named = new URLSearchParams(location.hash.slice(1));
if (named.has("token")) {
  sessionStorage.setItem("token", named.get("token"));
  named.delete("token");
  history.replaceState(null, "", named.size ? `#${named}` : location.pathname);
}

export const hasToken = () => sessionStorage.getItem("token") !== null;

const path = (run, what = "") => `/api/runs/${encodeURIComponent(run)}${what}`;

async function json(response) {
  const value = await response.json().catch(() => ({ error: `the server said ${response.status}` }));
  if (!response.ok) throw new Error(value.error);
  return value;
}

export const runs = async () => json(await fetch("/api/runs"));
export const whole = async (run) => json(await fetch(path(run)));
export const timeline = async (run) => json(await fetch(path(run, "/timeline")));
export const reportOf = (run) => path(run, "/report");

/** Asks a run for something, and returns its reply once that has taken effect. */
export async function ask(run, request) {
  const headers = { "content-type": "application/json", "x-hydra-token": sessionStorage.getItem("token") ?? "" };
  const reply = await json(await fetch(path(run, "/control"), { method: "POST", headers, body: JSON.stringify(request) }));
  if (!reply.ok) throw new Error(reply.error);
  return reply;
}

/** Follows a run from a byte of its lines on; `begin` says that another run has taken its place. */
export function follow(run, from, { news, begin, lost, back }) {
  const events = new EventSource(path(run, `/events?from=${from}`));
  events.addEventListener("news", (event) => news(JSON.parse(event.data)));
  events.addEventListener("begin", begin);
  events.addEventListener("error", lost);
  events.addEventListener("open", back);
  return events;
}
