//! MLflow by its REST API: an experiment for the run directory, and an MLflow run for each task.
//!
//! `mlflow.json` records how far each task has been sent. Lines that the server does not accept are not lost: they are in
//! `metrics.jsonl`, and a resumed run sends those that `mlflow.json` does not record.

use super::figures::{Figure, figures};
use super::mirror::Sink;
use crate::run_dir::{LogLine, LoggedEvent, MLFLOW, could_not, write_in};
use anyhow::{Context, Result, bail, ensure};
use hydra_engine::TaskState;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// MLflow's limits of metrics and parameters per request.
const METRICS: usize = 1000;
const PARAMETERS: usize = 100;
/// The maximum length of a parameter that every version accepts.
const LONGEST: usize = 500;
/// The timeout of a request, and the pause after a failed one.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(5);

/// The tag with the time of a task's first line in milliseconds, which distinguishes runs of one directory.
const BEGUN: &str = "hydra.begun";

/// An MLflow server, and the data to send.
pub(crate) struct Mlflow {
    agent: ureq::Agent,
    uri: String,
    dir: PathBuf,
    sent: SentData,
    waiting: BTreeMap<String, Unsent>,
    /// The last failure and its time.
    failed: Option<(Instant, anyhow::Error)>,
}

/// The data that the server has.
#[derive(Debug, Default, Serialize, Deserialize)]
struct SentData {
    uri: String,
    experiment: Option<String>,
    tasks: BTreeMap<String, SentTask>,
}

/// The data that the server has of a task: its MLflow run, and the last step of each metric.
#[derive(Debug, Default, Serialize, Deserialize)]
struct SentTask {
    run: String,
    #[serde(default)]
    last: BTreeMap<String, u64>,
    /// The final state in MLflow's terms.
    ended: Option<String>,
}

/// The data of a task that is still to be sent.
#[derive(Debug, Default)]
struct Unsent {
    begun_ms: i64,
    parameters: Vec<(String, String)>,
    metrics: Vec<Metric>,
    /// The final state and its time.
    ended: Option<(&'static str, i64)>,
}

#[derive(Clone, Debug, Serialize)]
struct Metric {
    key: String,
    step: u64,
    value: f64,
    timestamp: i64,
}

impl Mlflow {
    /// Reads from `dir` what this server has already. Sends nothing yet.
    pub(crate) fn new(uri: &str, dir: &Path) -> Result<Self> {
        let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false);
        let uri = uri.trim_end_matches('/').to_owned();
        let path = dir.join(MLFLOW);
        let mut sent = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => SentData::default(),
            read => serde_json::from_slice(&read.with_context(|| could_not(&path, "read"))?).with_context(
                || format!("`{}` is not valid: remove it to send everything again", path.display()),
            )?,
        };
        if sent.uri != uri {
            sent = SentData { uri: uri.clone(), ..SentData::default() };
        }
        let waiting = BTreeMap::new();
        Ok(Self { agent: agent.build().into(), uri, dir: dir.to_owned(), sent, waiting, failed: None })
    }

    fn send(&mut self) -> Result<()> {
        let names: Vec<String> = self.waiting.keys().cloned().collect();
        for name in names {
            self.begin(&name)?;
            self.send_metrics(&name)?;
            self.end_run(&name)?;
            self.waiting.remove(&name);
        }
        Ok(())
    }

    /// Creates the MLflow run of a task, if there is none yet.
    fn begin(&mut self, name: &str) -> Result<()> {
        if self.sent.tasks.contains_key(name) {
            return Ok(());
        }
        let experiment = self.experiment()?;
        let Some(waiting) = self.waiting.get(name) else { return Ok(()) };
        let pair = |(key, value): &(String, String)| json!({ "key": key, "value": value });
        let parameters: Vec<Value> = waiting.parameters.iter().take(PARAMETERS).map(pair).collect();
        let begun_ms = waiting.begun_ms;
        let run = match self.made_before(&experiment, name, begun_ms)? {
            Some(run) => run,
            None => self.make(&experiment, name, begun_ms)?,
        };
        self.post("runs/log-batch", &json!({ "run_id": run, "params": parameters }))?;
        self.sent.tasks.insert(name.to_owned(), SentTask { run, ..SentTask::default() });
        self.note()
    }

    fn make(&self, experiment: &str, name: &str, begun_ms: i64) -> Result<String> {
        let tag = |key: &str, value: &str| json!({ "key": key, "value": value });
        let tags =
            [tag("hydra.run_directory", &self.dir.display().to_string()), tag(BEGUN, &begun_ms.to_string())];
        let run =
            json!({ "experiment_id": experiment, "run_name": name, "start_time": begun_ms, "tags": tags });
        text(&self.post("runs/create", &run)?["run"]["info"]["run_id"], "run")
    }

    /// Finds the MLflow run of a task that was created although the answer was lost.
    fn made_before(&self, experiment: &str, name: &str, begun_ms: i64) -> Result<Option<String>> {
        let filter = format!("tags.`{BEGUN}` = '{begun_ms}'");
        let found = self.post("runs/search", &json!({ "experiment_ids": [experiment], "filter": filter }))?;
        let runs = found["runs"].as_array().into_iter().flatten().map(|run| &run["info"]);
        let mut own = runs.filter(|info| info["run_name"] == name);
        Ok(own.find_map(|info| info["run_id"].as_str().map(str::to_owned)))
    }

    /// Returns the experiment named after the run directory, and creates it if necessary.
    fn experiment(&mut self) -> Result<String> {
        if let Some(experiment) = &self.sent.experiment {
            return Ok(experiment.clone());
        }
        let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let name = dir.file_name().map_or("hydra".into(), |name| name.to_string_lossy().into_owned());
        let url = format!("{}/api/2.0/mlflow/experiments/get-by-name", self.uri);
        let found = self.agent.get(&url).query("experiment_name", &name).call();
        let found = found.with_context(|| format!("`{}` does not answer", self.uri))?;
        let is_new = found.status() == 404;
        let id = match answer(found) {
            // `answer` has read the body, so that the connection can be reused.
            Err(_) if is_new => {
                let made = self.post("experiments/create", &json!({ "name": name }))?;
                text(&made["experiment_id"], "experiment")?
            }
            found => text(&found?["experiment"]["experiment_id"], "experiment")?,
        };
        self.sent.experiment = Some(id.clone());
        Ok(id)
    }

    fn send_metrics(&mut self, name: &str) -> Result<()> {
        loop {
            let Some(waiting) = self.waiting.get(name) else { return Ok(()) };
            let batch: Vec<Metric> = waiting.metrics.iter().take(METRICS).cloned().collect();
            if batch.is_empty() {
                return Ok(());
            }
            let run = &self.sent.tasks[name].run;
            self.post("runs/log-batch", &json!({ "run_id": run, "metrics": batch }))?;
            let task = self.sent.tasks.entry(name.to_owned()).or_default();
            task.last.extend(batch.iter().map(|metric| (metric.key.clone(), metric.step)));
            self.waiting.entry(name.to_owned()).or_default().metrics.drain(..batch.len());
            self.note()?;
        }
    }

    fn end_run(&mut self, name: &str) -> Result<()> {
        let Some((state, at)) = self.waiting.get(name).and_then(|waiting| waiting.ended) else {
            return Ok(());
        };
        let task = &self.sent.tasks[name];
        if task.ended.as_deref() == Some(state) {
            return Ok(());
        }
        self.post("runs/update", &json!({ "run_id": task.run, "status": state, "end_time": at }))?;
        self.sent.tasks.entry(name.to_owned()).or_default().ended = Some(state.to_owned());
        self.note()
    }

    /// Records what the server has.
    fn note(&self) -> Result<()> {
        write_in(&self.dir, MLFLOW, &format!("{}\n", serde_json::to_string_pretty(&self.sent)?))
    }

    fn post(&self, what: &str, request: &Value) -> Result<Value> {
        let url = format!("{}/api/2.0/mlflow/{what}", self.uri);
        let response = self.agent.post(&url).send_json(request);
        answer(response.with_context(|| format!("`{}` does not answer", self.uri))?)
            .with_context(|| format!("`{}` refused {what}", self.uri))
    }

    /// Returns the number of metrics that have not been sent.
    fn left(&self) -> usize {
        self.waiting.values().map(|waiting| waiting.metrics.len()).sum()
    }

    /// Returns true if the metric of this step is sent or queued.
    fn knows(&self, task: &str, key: &str, step: u64) -> bool {
        let sent =
            self.sent.tasks.get(task).and_then(|task| task.last.get(key)).is_some_and(|last| step <= *last);
        let waits = || {
            let waiting = self.waiting.get(task)?;
            waiting.metrics.iter().rfind(|metric| metric.key == key).map(|metric| step <= metric.step)
        };
        sent || waits().unwrap_or(false)
    }
}

impl Sink for Mlflow {
    fn take(&mut self, line: &LogLine) -> Result<()> {
        let Some(name) = line.event.task() else { return Ok(()) };
        let at = (line.time.unwrap_or_default() * 1e3) as i64;
        let numbers = numbers(&line.event);
        let new = numbers
            .into_iter()
            .filter(|(key, step, value)| value.is_finite() && !self.knows(name, key, *step));
        let new: Vec<Metric> =
            new.map(|(key, step, value)| Metric { key, step, value, timestamp: at }).collect();
        let (ended, parameters) = match &line.event {
            LoggedEvent::End { state, .. } => (Some((ending(*state), at)), None),
            LoggedEvent::Task { config, .. } if !self.sent.tasks.contains_key(name) => {
                (None, Some(parameters(config)))
            }
            _ => (None, None),
        };
        if new.is_empty() && ended.is_none() && parameters.is_none() {
            return Ok(());
        }
        let waiting = self
            .waiting
            .entry(name.to_owned())
            .or_insert_with(|| Unsent { begun_ms: at, ..Unsent::default() });
        waiting.metrics.extend(new);
        waiting.parameters = parameters.unwrap_or_else(|| std::mem::take(&mut waiting.parameters));
        waiting.ended = ended.or(waiting.ended);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if self.failed.as_ref().is_some_and(|(at, _)| at.elapsed() < PAUSE) {
            return Ok(());
        }
        self.failed = self.send().err().map(|error| (Instant::now(), error));
        Ok(())
    }

    fn end(&mut self) -> Result<Option<String>> {
        self.failed = None;
        self.flush()?;
        let Some((_, error)) = self.failed.take() else { return Ok(None) };
        Ok(Some(format!(
            "{} metrics could not be sent: {error:#}; they are in metrics.jsonl, and `hydra resume {} --mlflow {}` sends them \
            (progress is recorded in {MLFLOW})",
            self.left(),
            self.dir.display(),
            self.uri
        )))
    }
}

/// Returns the metrics of an event by their MLflow names.
fn numbers(event: &LoggedEvent) -> Vec<(String, u64, f64)> {
    let Some((step, figures)) = figures(event) else { return Vec::new() };
    let named = |Figure { name, on, value }: Figure<'_>| {
        (on.map_or_else(|| name.to_owned(), |on| format!("{on}_{name}")), step, value)
    };
    figures.into_iter().map(named).collect()
}

/// Returns a state in MLflow's terms.
fn ending(state: TaskState) -> &'static str {
    match state {
        TaskState::Failed => "FAILED",
        TaskState::Stopped => "KILLED",
        TaskState::Done => "FINISHED",
    }
}

/// Returns the settings of a task; nested settings have both names joined by a dot.
fn parameters(config: &Value) -> Vec<(String, String)> {
    let Some(settings) = config.as_object() else { return Vec::new() };
    let pairs = settings.iter().flat_map(|(name, value)| match value {
        Value::Object(_) => {
            parameters(value).into_iter().map(|(inner, value)| (format!("{name}.{inner}"), value)).collect()
        }
        Value::Null => Vec::new(),
        Value::String(text) => vec![(name.clone(), text.chars().take(LONGEST).collect())],
        other => vec![(name.clone(), other.to_string().chars().take(LONGEST).collect())],
    });
    pairs.collect()
}

/// Returns the JSON answer of a server. Fails if its status is not a success.
fn answer(mut response: ureq::http::Response<ureq::Body>) -> Result<Value> {
    let status = response.status();
    let text = response.body_mut().read_to_string().context("the answer is incomplete")?;
    ensure!(status.is_success(), "status {status}: {}", text.chars().take(300).collect::<String>());
    serde_json::from_str(&text).context("the answer is not valid JSON: is it an MLflow server?")
}

fn text(value: &Value, what: &str) -> Result<String> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => bail!("the server's answer has no {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A server that records its requests, and refuses those that contain `bad`.
    fn server(listener: TcpListener) -> Receiver<(String, Value)> {
        let (tell, asked) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let tell = tell.clone();
                std::thread::spawn(move || while answer_one(&stream, &tell) {});
            }
        });
        asked
    }

    /// Answers a request. Returns false if there is none.
    fn answer_one(mut stream: &TcpStream, tell: &Sender<(String, Value)>) -> bool {
        let (mut reader, mut lines) = (BufReader::new(stream), Vec::new());
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return false;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
            lines.push(line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let path = lines[0].split(' ').nth(1).unwrap().trim_start_matches("/api/2.0/mlflow/").to_owned();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let (status, reply) = match path.as_str() {
            _ if body.to_string().contains("bad") => ("400 Bad Request", json!({ "message": "not so" })),
            path if path.starts_with("experiments/get-by-name") => ("404 Not Found", json!({})),
            "experiments/create" => ("200 OK", json!({ "experiment_id": "7" })),
            "runs/create" => ("200 OK", json!({ "run": { "info": { "run_id": body["run_name"] } } })),
            "runs/search" => {
                // It created a run for this task before, and the answer was lost.
                let lost = body["filter"] == "tags.`hydra.begun` = '2000'";
                let run = json!({ "info": { "run_id": "lost", "run_name": "a" } });
                ("200 OK", json!({ "runs": Vec::from_iter(lost.then_some(run)) }))
            }
            _ => ("200 OK", json!({})),
        };
        let reply = reply.to_string();
        let length = reply.len();
        let sent = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{reply}");
        tell.send((path, body)).is_ok() && sent.is_ok()
    }

    fn listening() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap());
        (listener, uri)
    }

    fn minibatch(step: u64, loss: f64) -> Value {
        json!({ "event": "minibatch", "task": "a", "step": step, "loss": loss, "rate": 0.5, "time": 2.0 })
    }

    fn lines() -> Vec<Value> {
        let config = json!({ "batch": 8, "dropout": null, "training": { "lr": 0.5, "schedule": "linear" } });
        let task = json!({ "event": "task", "task": "a", "config": config, "steps": 1500, "time": 1.0 });
        let end = json!({ "event": "end", "task": "a", "state": "stopped", "time": 3.0 });
        let trained = (0..1500).map(|step| minibatch(step, if step == 3 { f64::NAN } else { 1.0 }));
        [task].into_iter().chain(trained).chain([end]).collect()
    }

    /// Takes lines and ends. Returns the text on unsent lines.
    fn sent(uri: &str, dir: &Path, lines: &[Value]) -> Option<String> {
        let mut mlflow = Mlflow::new(uri, dir).unwrap();
        let lines = lines.iter().map(|line| serde_json::from_value(line.clone()).unwrap());
        lines.for_each(|line: LogLine| mlflow.take(&line).unwrap());
        mlflow.end().unwrap()
    }

    fn steps(asked: &[(String, Value)], key: &str) -> Vec<u64> {
        let metrics = asked.iter().filter_map(|(_, body)| body["metrics"].as_array()).flatten();
        metrics.filter(|metric| metric["key"] == key).map(|metric| metric["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn everything_is_sent_once_in_batches() {
        let (dir, (listener, uri)) = (tempfile::tempdir().unwrap(), listening());
        let asked = server(listener);
        assert_eq!(sent(&uri, dir.path(), &lines()[..700]), None);
        // The run is resumed: all lines are passed again.
        assert_eq!(sent(&uri, dir.path(), &lines()), None);
        assert_eq!(sent(&uri, dir.path(), &lines()), None);
        let asked: Vec<_> = asked.try_iter().collect();
        let count = |path: &str| asked.iter().filter(|(asked, _)| asked.starts_with(path)).count();
        assert_eq!(["experiments/create", "runs/create", "runs/update"].map(count), [1, 1, 1]);
        assert_eq!(steps(&asked, "training_loss"), (0..1500).filter(|step| *step != 3).collect::<Vec<u64>>());
        assert_eq!(steps(&asked, "learning_rate"), (0..1500).collect::<Vec<u64>>());
        let most = asked.iter().filter_map(|(_, body)| Some(body["metrics"].as_array()?.len())).max();
        assert_eq!(most, Some(METRICS));
        let parameters = asked.iter().find_map(|(_, body)| body.get("params")).unwrap();
        let of = |key: &str, value: &str| json!({ "key": key, "value": value });
        let expected = [of("batch", "8"), of("training.lr", "0.5"), of("training.schedule", "linear")];
        assert_eq!(*parameters, json!(expected));
        assert_eq!(asked.last().unwrap().1, json!({ "run_id": "a", "status": "KILLED", "end_time": 3000 }));
    }

    #[test]
    fn what_no_server_takes_is_said_and_sent_later() {
        let (dir, (listener, uri)) = (tempfile::tempdir().unwrap(), listening());
        drop(listener);
        let said = sent(&uri, dir.path(), &lines()).unwrap();
        let parts = ["2999 metrics could not be sent", "does not answer", "hydra resume", &uri];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        let listener = TcpListener::bind(uri.strip_prefix("http://").unwrap()).unwrap();
        let asked = server(listener);
        assert_eq!(sent(&uri, dir.path(), &lines()), None);
        assert_eq!(steps(&asked.try_iter().collect::<Vec<_>>(), "learning_rate").len(), 1500);
    }

    #[test]
    fn a_run_whose_making_was_not_answered_is_found_again() {
        let (dir, (listener, uri)) = (tempfile::tempdir().unwrap(), listening());
        let asked = server(listener);
        assert_eq!(sent(&uri, dir.path(), &[minibatch(0, 1.0)]), None);
        let asked: Vec<_> = asked.try_iter().collect();
        assert!(asked.iter().all(|(path, _)| path != "runs/create"));
        assert_eq!(asked.last().unwrap().1["run_id"], "lost");
    }

    #[test]
    fn evaluations_have_what_a_model_measures() {
        let (dir, (listener, uri)) = (tempfile::tempdir().unwrap(), listening());
        let asked = server(listener);
        let evaluation = json!({
            "event": "evaluation", "task": "a", "kind": "test", "step": 9, "loss": 0.5,
            "metrics": { "accuracy": 0.75 }, "time": 3.0,
        });
        assert_eq!(sent(&uri, dir.path(), &[evaluation]), None);
        let asked: Vec<_> = asked.try_iter().collect();
        assert_eq!((steps(&asked, "test_loss"), steps(&asked, "test_accuracy")), (vec![9], vec![9]));
    }

    #[test]
    fn a_server_that_refuses_is_quoted() {
        let (dir, (listener, uri)) = (tempfile::tempdir().unwrap(), listening());
        let _asked = server(listener);
        let line =
            json!({ "event": "minibatch", "task": "bad", "step": 0, "loss": 1.0, "rate": 0.5, "time": 3.0 });
        let said = sent(&uri, dir.path(), &[line]).unwrap();
        assert!(said.contains("refused runs/create") && said.contains("not so"), "{said}");
    }
}
