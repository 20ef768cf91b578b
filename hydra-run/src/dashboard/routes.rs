//! The routes and their handlers.

use super::assets::ASSETS;
use super::connections::{Connection, Connections};
use super::events::{self, Followed};
use super::guard::{Token, refusal};
use super::runs::{Runs, state};
use super::{snapshot, socket};
use crate::run_dir::{PAGE, TRACE, last_spans};
use crate::terminal::render;
use anyhow::Context as _;
use axum::body::{Body, to_bytes};
use axum::extract::{Path as InPath, Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};

/// The maximum size of a request body in bytes, and the time limit to receive it.
const LONGEST: usize = 1 << 16;
const PATIENCE: Duration = Duration::from_secs(10);
/// The maximum number of commands that wait for the reply of a run.
const PENDING_COMMANDS: usize = 16;
/// The maximum number of prompts that wait for a model.
const PENDING_PROMPTS: usize = 8;

/// The content security policy of the dashboard: it loads from this server only, and cannot be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// The policy of HTML reports: they contain inline scripts, so they run in a sandbox.
const REPORT_POLICY: &str = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";

/// Continues a prompt with the model in a directory. The prompt is a row as `hydra generate --prompts` reads it, with `prompt` or
/// `messages`; the second number is the maximum of new tokens.
pub(crate) type Generate = Box<dyn Fn(&Path, &Value, u64) -> anyhow::Result<Value> + Send + Sync>;

/// The maximum number of new tokens of a request that does not state one, and of any request.
const NEW_TOKENS: [u64; 2] = [64, 1024];

/// The state that all requests share.
pub(super) struct Site {
    pub(super) runs: Runs,
    pub(super) token: Token,
    pending: Semaphore,
    generate: Option<Generate>,
    prompts: Arc<Semaphore>,
    /// One model generates at a time, so that the memory of one is enough.
    generating: Arc<Mutex<()>>,
}

type Shared = State<Arc<Site>>;

impl Site {
    pub(super) fn new(runs: Runs, token: Token, generate: Option<Generate>) -> Self {
        let (pending, prompts) =
            (Semaphore::new(PENDING_COMMANDS), Arc::new(Semaphore::new(PENDING_PROMPTS)));
        Self { runs, token, pending, generate, prompts, generating: Arc::default() }
    }
}

/// Returns the router of the dashboard.
pub(super) fn router(site: Arc<Site>, connections: Connections) -> Router {
    let mut router = Router::new()
        .route("/api/runs", get(list))
        .route("/api/runs/{run}", get(whole))
        .route("/api/runs/{run}/events", get(follow))
        .route("/api/runs/{run}/timeline", get(devices))
        .route("/api/runs/{run}/report", get(report))
        .route("/api/runs/{run}/control", post(control))
        .route("/api/runs/{run}/generate", post(generate));
    for (path, kind, text) in ASSETS {
        router = router.route(path, get(move || async move { ([(header::CONTENT_TYPE, kind)], text) }));
    }
    router.layer(Extension(connections)).layer(middleware::from_fn(guarded)).with_state(site)
}

/// Refuses requests as [`refusal`] decides, and adds the security headers to the response.
async fn guarded(request: Request, next: Next) -> Response {
    let mut response = match refusal(request.headers()) {
        Some(why) => problem(StatusCode::FORBIDDEN, why),
        None => next.run(request).await,
    };
    let policies = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in policies {
        response.headers_mut().entry(name).or_insert(header::HeaderValue::from_static(value));
    }
    response
}

fn problem(status: StatusCode, why: &str) -> Response {
    (status, text_of(&json!({ "ok": false, "error": why }))).into_response()
}

fn text_of(value: &Value) -> impl IntoResponse + use<> {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string())
}

/// Reads files on another thread, so that other requests do not wait.
async fn reading(read: impl FnOnce() -> anyhow::Result<Value> + Send + 'static) -> Response {
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(value)) => text_of(&value).into_response(),
        Ok(Err(error)) => problem(StatusCode::INTERNAL_SERVER_ERROR, render(&error).trim_end()),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "reading the run failed"),
    }
}

/// Returns the response for a run that is not shown.
fn not_found(run: &str) -> Response {
    problem(StatusCode::NOT_FOUND, &format!("no run is called `{run}`"))
}

async fn list(State(site): Shared) -> Response {
    reading(move || Ok(site.runs.list())).await
}

async fn whole(State(site): Shared, InPath(run): InPath<String>) -> Result<Response, Response> {
    let dir = site.runs.dir(&run).ok_or_else(|| not_found(&run))?;
    Ok(reading(move || {
        let run = site.runs.follower(&dir);
        let mut run = run.lock().unwrap_or_else(PoisonError::into_inner);
        let mut whole = snapshot::whole(&mut run, &dir)?;
        whole["generates"] = json!(site.generate.is_some());
        Ok(whole)
    })
    .await)
}

async fn devices(State(site): Shared, InPath(run): InPath<String>) -> Result<Response, Response> {
    let trace = site.runs.dir(&run).ok_or_else(|| not_found(&run))?.join(TRACE);
    Ok(reading(move || Ok(last_spans(&trace)?)).await)
}

async fn report(State(site): Shared, InPath(run): InPath<String>) -> Result<Response, Response> {
    let html = site.runs.dir(&run).ok_or_else(|| not_found(&run))?.join(PAGE);
    let read = tokio::task::spawn_blocking(move || std::fs::read(html)).await;
    let text = read.ok().and_then(Result::ok);
    let text = text.ok_or_else(|| problem(StatusCode::NOT_FOUND, "the run has no report.html yet"))?;
    let kind = (header::CONTENT_TYPE, "text/html; charset=utf-8");
    Ok(([kind, (header::CONTENT_SECURITY_POLICY, REPORT_POLICY)], text).into_response())
}

async fn follow(
    State(site): Shared,
    Extension(connections): Extension<Connections>,
    Extension(connection): Extension<Connection>,
    InPath(run): InPath<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let dir = site.runs.dir(&run).ok_or_else(|| not_found(&run))?;
    let busy = || problem(StatusCode::SERVICE_UNAVAILABLE, "too many dashboards are open: close one");
    let stream = connection.stream(&connections).ok_or_else(busy)?;
    let run = site.runs.follower(&dir);
    let (from, state) = (start_offset(&uri, &headers), state(&dir));
    let events = events::stream_of(Followed { dir, run, from, state, _stream: stream });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(PATIENCE)).into_response())
}

/// Returns the offset from which a stream continues: the last event id of a reconnecting browser, or the `from` of the query.
fn start_offset(uri: &Uri, headers: &HeaderMap) -> u64 {
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let asked = uri.query().and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("from=")));
    last.or(asked).and_then(|from| from.parse().ok()).unwrap_or(0)
}

/// The refusal of a request without the token.
fn unauthorized(site: &Site, headers: &HeaderMap) -> Option<Response> {
    let why = "a command needs the token: open the address that was printed when the server started";
    (!site.token.is_in(headers)).then(|| problem(StatusCode::FORBIDDEN, why))
}

/// Continues a prompt with the model of a task that has ended: `task`, `prompt` or `messages`, and `max_new_tokens`.
async fn generate(
    State(site): Shared,
    InPath(run): InPath<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    if let Some(refused) = unauthorized(&site, &headers) {
        return Err(refused);
    }
    if site.generate.is_none() {
        let why =
            "the dashboard of a run in progress generates no texts: open the run with `hydra serve DIR`";
        return Err(problem(StatusCode::SERVICE_UNAVAILABLE, why));
    }
    let dir = site.runs.dir(&run).ok_or_else(|| not_found(&run))?;
    let bad = |why: String| problem(StatusCode::BAD_REQUEST, &why);
    let (task, prompt, most) = asked(&read(body).await?).map_err(bad)?;
    let run = site.runs.follower(&dir);
    let model = tokio::task::spawn_blocking(move || {
        let mut run = run.lock().unwrap_or_else(PoisonError::into_inner);
        snapshot::model(&mut run, &dir, &task)
    });
    let missing = |why: &str| problem(StatusCode::NOT_FOUND, why);
    let model = model.await.map_err(|_| missing("reading the run failed"))?;
    let model = model.map_err(|error| missing(&error.to_string()))?;
    let busy = |_| problem(StatusCode::SERVICE_UNAVAILABLE, "too many prompts wait: try again");
    let pending = Arc::clone(&site.prompts).try_acquire_owned().map_err(busy)?;
    let one = Arc::clone(&site.generating).lock_owned().await;
    Ok(reading(move || {
        // A browser that no longer waits does not let the next model in.
        let _held = (pending, one);
        let generate = site.generate.as_ref().context("the server generates no texts")?;
        generate(&model, &prompt, most)
    })
    .await)
}

/// The task, the prompt's row and the maximum number of new tokens of a request, or why it is invalid.
fn asked(body: &[u8]) -> Result<(String, Value, u64), String> {
    let request: Value =
        serde_json::from_slice(body).map_err(|error| format!("the request is not JSON: {error}"))?;
    let task = request["task"].as_str().ok_or("the request has no `task`")?;
    let (prompt, messages) = (&request["prompt"], &request["messages"]);
    let prompt = match (prompt.is_string(), messages.is_array()) {
        (true, false) => json!({ "prompt": prompt }),
        (false, true) => json!({ "messages": messages }),
        _ => return Err("the request must have `prompt`, a text, or `messages`, a list".to_owned()),
    };
    let [default, largest] = NEW_TOKENS;
    match &request["max_new_tokens"] {
        Value::Null => Ok((task.to_owned(), prompt, default)),
        given => match given.as_u64().filter(|most| (1..=largest).contains(most)) {
            Some(most) => Ok((task.to_owned(), prompt, most)),
            None => Err(format!("`max_new_tokens` must be from 1 to {largest}, got {given}")),
        },
    }
}

async fn control(
    State(site): Shared,
    InPath(run): InPath<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    if let Some(refused) = unauthorized(&site, &headers) {
        return Err(refused);
    }
    let dir = site.runs.dir(&run).ok_or_else(|| not_found(&run))?;
    let refused = |status| move |why: String| problem(status, &why);
    let line = socket::line(&read(body).await?).map_err(refused(StatusCode::BAD_REQUEST))?;
    let busy = |_| problem(StatusCode::SERVICE_UNAVAILABLE, "too many commands wait for a run: try again");
    let _pending = site.pending.try_acquire().map_err(busy)?;
    let reply = socket::send(&dir, &line).await.map_err(refused(StatusCode::BAD_GATEWAY))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], reply).into_response())
}

/// Reads the body of a request, within [`LONGEST`] bytes and [`PATIENCE`].
async fn read(body: Body) -> Result<axum::body::Bytes, Response> {
    match tokio::time::timeout(PATIENCE, to_bytes(body, LONGEST)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => Err(problem(StatusCode::PAYLOAD_TOO_LARGE, "a request body may have at most 64 KiB")),
        Err(_) => Err(problem(StatusCode::REQUEST_TIMEOUT, "the request was not complete after 10 seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_a_text_names_a_task_and_a_prompt() {
        let asked = |text: &str| asked(text.as_bytes());
        let row = |found: (String, Value, u64)| (found.0, found.1.to_string(), found.2);
        let plain = asked(r#"{"task": "a", "prompt": "x", "max_new_tokens": 5}"#).map(row).unwrap();
        assert_eq!(plain, ("a".to_owned(), r#"{"prompt":"x"}"#.to_owned(), 5));
        let chat = asked(r#"{"task": "a", "messages": [{"role": "user", "content": "x"}]}"#).unwrap();
        assert!(chat.1["messages"][0]["role"] == "user" && chat.2 == 64);
        for (wrong, part) in [
            ("{", "not JSON"),
            (r#"{"prompt": "x"}"#, "no `task`"),
            (r#"{"task": "a", "prompt": 3}"#, "`prompt`, a text"),
            (r#"{"task": "a", "prompt": "x", "max_new_tokens": 0}"#, "from 1 to 1024, got 0"),
        ] {
            let why = asked(wrong).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
    }
}
