//! The dashboard over HTTP: `hydra serve`, and `--serve` of a run.

use crate::common::{fails, grid, interrupt, json, says, spawn, text, wait_for};
use crate::http::{Answer, Events, request};
use serde_json::{Value, json as value};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// A running `hydra serve`.
pub struct Served {
    child: Child,
    pub address: String,
    pub token: String,
}

impl Served {
    pub fn new(dirs: &[&Path]) -> Self {
        let dirs = dirs.iter().map(|dir| dir.to_str().unwrap());
        let mut child = spawn(&[vec!["serve"], dirs.collect()].concat(), Stdio::piped());
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        let (address, token) = parts(url.trim());
        Self { child, address, token }
    }

    pub fn get(&self, path: &str) -> Answer {
        request(&self.address, "GET", path, &[], "")
    }

    fn post(&self, run: &Path, token: &str, body: &str) -> Answer {
        self.post_to("control", run, token, body)
    }

    fn post_to(&self, what: &str, run: &Path, token: &str, body: &str) -> Answer {
        let path = format!("{}/{what}", path_of(run));
        request(&self.address, "POST", &path, &[("x-hydra-token", token)], body)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Returns the address and the token of a printed URL.
fn parts(url: &str) -> (String, String) {
    let (address, token) = url.strip_prefix("http://").unwrap().split_once("/#token=").unwrap();
    (address.to_owned(), token.to_owned())
}

/// Returns the path of a run on the server.
pub fn path_of(run: &Path) -> String {
    format!("/api/runs/{}", run.to_str().unwrap().replace('/', "%2F"))
}

/// Trains a run of two tasks to its end.
pub fn ended(root: &Path) -> PathBuf {
    let dir = root.join("run");
    says(&[&grid("--steps 3 --cuts 2,4")[..], &["--out", dir.to_str().unwrap()]].concat());
    dir
}

/// Makes the directory of an ended run look like that of a running one, with a socket that answers, until this is dropped.
pub struct Pretended {
    _lock: File,
    dir: PathBuf,
    pub asked: Receiver<Value>,
}

impl Pretended {
    pub fn new(dir: &Path) -> Self {
        fs::remove_file(dir.join("report.json")).unwrap();
        let lock = File::open(dir).unwrap();
        lock.lock().unwrap();
        let (listener, (sender, asked)) = (UnixListener::bind(dir.join("control.sock")).unwrap(), channel());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mut line = String::new();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
                let request: Value = serde_json::from_str(&line).unwrap();
                let reply = match request["task"].as_str() {
                    Some("missing") => value!({ "ok": false, "error": "there is no task `missing`" }),
                    _ => value!({ "ok": true, "task": request["task"], "at": 3 }),
                };
                (&stream).write_all(format!("{reply}\n").as_bytes()).unwrap();
                if sender.send(request).is_err() {
                    break;
                }
            }
        });
        Self { _lock: lock, dir: dir.to_owned(), asked }
    }

    /// Appends a minibatch to the log.
    pub fn trains(&self, task: &str, step: u64, loss: f64) {
        let line = value!({
            "event": "minibatch", "task": task, "step": step, "steps": 9, "loss": loss, "rate": 0.1, "units": 8, "at_s": 99.0,
            "time": 2e9,
        });
        let mut metrics = OpenOptions::new().append(true).open(self.dir.join("metrics.jsonl")).unwrap();
        metrics.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

#[test]
fn the_models_of_a_run_continue_a_prompt() {
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let served = Served::new(&[&dir]);
    let report = json(&dir.join("report.json"));
    let task = &report["tasks"][1];
    let ask = |token: &str, body: Value| served.post_to("generate", &dir, token, &body.to_string());
    let body = value!({ "task": task["name"], "prompt": "--the ship", "max_new_tokens": 7 });
    let answer = ask(&served.token, body.clone());
    assert_eq!(answer.status, 200, "{}", answer.body);
    let expected = says(&[
        "generate",
        "--model",
        task["model_dir"].as_str().unwrap(),
        "--prompt=--the ship",
        "--max-new-tokens",
        "7",
        "--json",
    ]);
    assert_eq!(answer.json(), serde_json::from_str::<Value>(&expected).unwrap());
    assert_eq!(answer.json()["token_ids"].as_array().unwrap().len(), 7);
    assert_eq!(ask("no token", body.clone()).status, 403);
    let refused = |body: Value, status: u16, part: &str| {
        let answer = ask(&served.token, body);
        assert!(answer.status == status && answer.body.contains(part), "{} {}", answer.status, answer.body);
    };
    refused(value!({ "task": "another", "prompt": "x" }), 404, "no task is called");
    refused(value!({ "task": task["name"] }), 400, "`prompt`, a text");
    let chat = value!([{ "role": "user", "content": "x" }]);
    refused(value!({ "task": task["name"], "messages": chat }), 500, "chat template");
    // The models are those of the directory, also where it was moved to.
    let moved = root.path().join("moved");
    fs::rename(&dir, &moved).unwrap();
    let served = Served::new(&[&moved]);
    let ask = |body: &Value| served.post_to("generate", &moved, &served.token, &body.to_string());
    assert_eq!(ask(&body).json()["token_ids"], answer.json()["token_ids"]);
    fs::remove_dir_all(moved.join("models").join(task["name"].as_str().unwrap())).unwrap();
    let answer = ask(&body);
    assert!(answer.status == 404 && answer.body.contains("has no model"), "{}", answer.body);
}

#[test]
fn a_run_that_has_ended_is_shown_whole() {
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let served = Served::new(&[root.path()]);
    let page = served.get("/");
    assert!(page.status == 200 && page.body.contains("<title>Hydra</title>"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    for asset in page.body.split('"').filter(|part| part.ends_with(".js") || part.ends_with(".css")) {
        assert_eq!(served.get(asset).status, 200, "{asset}");
    }
    let list = served.get("/api/runs").json();
    assert_eq!((&list[0]["name"], &list[0]["state"]), (&value!(dir), &value!("ended")));
    let run = served.get(&path_of(&dir)).json();
    let report = json(&dir.join("report.json"));
    for (curve, task) in run["curves"].as_array().unwrap().iter().zip(report["tasks"].as_array().unwrap()) {
        assert_eq!((&curve["task"], &curve["losses"]), (&task["name"], &task["losses"]), "to the bit");
    }
    let ranks: Vec<&Value> = run["tasks"].as_array().unwrap().iter().map(|task| &task["rank"]).collect();
    assert_eq!(ranks, [1, 2]);
    assert_eq!(run["memory"]["tiers"].as_array().unwrap().len(), 3);
    let timeline = served.get(&format!("{}/timeline", path_of(&dir))).json();
    assert!(timeline["spans"].as_array().unwrap().len() > 20);
    let report = served.get(&format!("{}/report", path_of(&dir)));
    assert!(
        report.body.contains("spec.toml")
            && report.header("content-security-policy").unwrap().starts_with("sandbox")
    );
    for nowhere in ["/api/runs/nowhere", "/api/runs/..%2F..%2Fetc", "/etc/passwd", "/assets/dashboard.js"] {
        assert_eq!(served.get(nowhere).status, 404, "{nowhere}");
    }
    drop(served);
    fails(&["serve", root.path().join("nowhere").to_str().unwrap()], 2, &["is not a directory"]);
    fails(&["serve", "--listen", "example.org:80"], 2, &["not an address to listen on"]);
}

#[test]
fn lines_arrive_while_a_run_goes_on_and_requests_reach_it() {
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let (run, served) = (Pretended::new(&dir), Served::new(&[&dir]));
    let whole = served.get(&path_of(&dir)).json();
    assert_eq!((&whole["state"], &whole["controllable"]), (&value!("running"), &value!(true)));
    let path = format!("{}/events?from={}", path_of(&dir), whole["from"]);
    let mut events = Events::open(&served.address, &path);
    run.trains("lr1e-3", 3, 0.125);
    let news = events.next();
    assert_eq!((&news["lines"][0]["loss"], &news["lines"][1]), (&value!(0.125), &Value::Null));
    run.trains("lr1e-3", 4, 0.0625);
    assert_eq!(events.next()["lines"][0]["step"], 4);

    let pause = r#"{"command":"pause","task":"lr1e-3","at":7}"#;
    let reply = served.post(&dir, &served.token, pause);
    assert_eq!((reply.status, reply.json()), (200, value!({ "ok": true, "task": "lr1e-3", "at": 3 })));
    assert_eq!(run.asked.recv().unwrap(), serde_json::from_str::<Value>(pause).unwrap(), "word for word");
    let unknown = served.post(&dir, &served.token, r#"{"command":"stop","task":"missing"}"#);
    assert_eq!(unknown.json()["error"], "there is no task `missing`");
    run.asked.recv().unwrap();

    // Requests without the token, from another site, to another host name, or with another command do not reach the run.
    let cut = &served.token[..31];
    assert_eq!(
        [cut, "", "0".repeat(32).as_str()].map(|token| served.post(&dir, token, pause).status),
        [403; 3]
    );
    let path = format!("{}/control", path_of(&dir));
    let from = |name: &str, value: &str| {
        let headers = [("x-hydra-token", served.token.as_str()), (name, value)];
        request(&served.address, "POST", &path, &headers, pause).status
    };
    assert_eq!(
        [from("origin", "http://evil.example"), from("origin", "null"), from("host", "evil.example")],
        [403; 3]
    );
    let post = |body: &str| served.post(&dir, &served.token, body).status;
    assert_eq!([post("{"), post(r#"{"command":"burn"}"#), post(&"x".repeat(1 << 17))], [400, 400, 413]);
    assert!(run.asked.try_recv().is_err());
    for name in ["evil.example", "localhost.evil.example:80"] {
        assert_eq!(request(&served.address, "GET", "/api/runs", &[("host", name)], "").status, 403);
    }
    // The run has gone.
    fs::remove_file(dir.join("control.sock")).unwrap();
    assert_eq!(post(pause), 502);
}

#[test]
fn connections_that_say_nothing_keep_nobody_out() {
    let root = tempfile::tempdir().unwrap();
    let served = Served::new(&[root.path()]);
    let slow: Vec<TcpStream> = (0..1000)
        .map_while(|_| TcpStream::connect(&served.address).ok())
        .inspect(|mut stream| drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: local")))
        .collect();
    assert!(slow.len() > 200, "only {} connections could be opened", slow.len());
    assert_eq!(served.get("/api/runs").json(), value!([]));
    // The first connections were closed for later ones.
    let mut end = Vec::new();
    (&slow[0]).read_to_end(&mut end).ok();
    assert!(end.is_empty());
    drop(slow);
    assert_eq!(served.get("/").status, 200);
}

#[test]
fn a_run_serves_its_dashboard_while_it_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let more = ["--serve", "--out", dir.to_str().unwrap()];
    let mut child = spawn(&[&grid("--steps 1000000 --cuts 2,4")[..], &more].concat(), Stdio::piped());
    let mut err = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let url = err.by_ref().find_map(|line| line.strip_prefix("note: dashboard: ").map(str::to_owned));
    let (address, _) = parts(&url.unwrap());
    assert!(address.starts_with("127.0.0.1:"));
    let drain = std::thread::spawn(move || err.count());
    let whole = || request(&address, "GET", &path_of(&dir), &[], "");
    wait_for(|| whole().status == 200 && whole().json()["curves"][0]["of"].as_u64() > Some(0));
    let mut events =
        Events::open(&address, &format!("{}/events?from={}", path_of(&dir), whole().json()["from"]));
    while !events.next()["lines"].as_array().unwrap().iter().any(|line| line["event"] == "minibatch") {}
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stdout));
    drain.join().unwrap();
    assert!(TcpStream::connect(&address).is_err(), "the dashboard has ended with the run");
    assert!(!dir.join("tensorboard").exists());
}

#[test]
fn what_is_no_address_or_taken_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let out = dir.to_str().unwrap();
    fails(
        &[&grid("--steps 1")[..], &["--out", out, "--serve", &taken]].concat(),
        1,
        &["cannot listen on", &taken],
    );
    assert!(!dir.exists());
    fails(&["train", "--serve", "nowhere"], 2, &["`nowhere` is not an address to listen on"]);
    fails(&["train", "--mlflow", "https://a"], 2, &["`https://a` is not an http address"]);
}
