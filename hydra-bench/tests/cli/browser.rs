//! The dashboard in a real browser, if one is installed with its driver (Debian: `chromium` and `chromium-driver`).

use crate::common::{Running, json as read_json, says, spawn, wait_for};
use crate::dashboard::{Pretended, Served, ended};
use crate::http::request;
use crate::run_control::ctl;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A headless browser, driven by the WebDriver protocol.
struct Browser {
    driver: Child,
    address: String,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser; `None` if no driver is installed.
    fn open() -> Option<Self> {
        let driver =
            Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut driver = driver.ok()?;
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map(Result::unwrap);
        let port = lines.find_map(|line| {
            Some(line.split_once("successfully on port ")?.1.trim_end_matches('.').to_owned())
        });
        let address = format!("127.0.0.1:{}", port.expect("the driver prints its port"));
        std::thread::spawn(move || lines.count());
        let profile = tempfile::tempdir().unwrap();
        let flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
                     --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000";
        let place = format!("--user-data-dir={}", profile.path().display());
        let flags: Vec<&str> = flags.split_whitespace().chain([place.as_str()]).collect();
        let wanted =
            json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": { "args": flags } } } });
        let begun = request(&address, "POST", "/session", &[], &wanted.to_string()).json();
        let session = begun["value"]["sessionId"].as_str().unwrap_or_else(|| panic!("{begun}")).to_owned();
        Some(Self { driver, address, session, _profile: profile })
    }

    fn ask(&self, what: &str, body: &Value) -> Value {
        let path = format!("/session/{}/{what}", self.session);
        let answer = request(&self.address, "POST", &path, &[], &body.to_string());
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["value"].take()
    }

    fn go(&self, url: &str) {
        self.ask("url", &json!({ "url": url }));
    }

    /// Opens the dashboard of a run, which is served until the result is dropped.
    fn show(&self, dir: &Path) -> Served {
        let served = Served::new(&[dir]);
        self.go(&format!("http://{}/#token={}", served.address, served.token));
        served
    }

    /// Returns the value of an expression on the dashboard.
    fn value(&self, expression: &str) -> Value {
        self.ask("execute/sync", &json!({ "script": format!("return {expression}"), "args": [] }))
    }

    fn wait_until(&self, expression: &str) {
        wait_for(|| self.value(expression) == true);
    }

    /// Clicks the element that a selector finds, as a mouse does.
    fn click(&self, selector: &str) {
        let found = self.ask("element", &json!({ "using": "css selector", "value": selector }));
        let element = found.as_object().unwrap().values().next().unwrap().as_str().unwrap().to_owned();
        self.ask(&format!("element/{element}/click"), &json!({}));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let path = format!("/session/{}", self.session);
        request(&self.address, "DELETE", &path, &[], "");
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

#[test]
fn losses_arrive_and_buttons_reach_the_run() {
    let Some(browser) = Browser::open() else {
        return eprintln!("skipped: there is no chromedriver here");
    };
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let (run, served) = (Pretended::new(&dir), Served::new(&[&dir]));
    browser.go(&format!("http://{}/#token={}", served.address, served.token));
    let row = "document.querySelector('tr[data-task=\"lr1e-3\"]')";
    browser.wait_until(&format!("{row} !== null && document.querySelectorAll('.uplot canvas').length >= 2"));
    assert_eq!(browser.value("location.href.includes('token')"), false, "the token stays out of the history");
    assert_eq!(browser.value("document.querySelectorAll('#tasks tbody tr').length"), 2);
    run.trains("lr1e-3", 3, 0.5);
    browser.wait_until(&format!("{row}.innerText.includes('4 / 9')"));
    assert_eq!(browser.value("document.getElementById('problem').hidden"), true);

    // A running task can be stopped; the other one has ended.
    browser.wait_until("document.querySelector('[data-act=\"stop lr1e-3\"]').disabled === false");
    assert_eq!(browser.value("document.querySelector('[data-act=\"stop lr3e-4\"]').disabled"), true);
    browser.click("[data-act=\"stop lr1e-3\"]");
    browser.click("#ask-yes");
    assert_eq!(run.asked.recv().unwrap(), json!({ "command": "stop", "task": "lr1e-3" }));
    browser
        .wait_until("document.getElementById('control').textContent.includes('was stopped at minibatch 3')");

    browser.click("[data-act=\"fork lr1e-3\"]");
    let fill =
        |id: &str, text: &str| browser.value(&format!("document.getElementById('{id}').value = '{text}'"));
    fill("ask-changes", "lr=1e-4\\nwarmup = 2");
    fill("ask-at", "2");
    browser.click("#ask-weights");
    browser.click("#ask-yes");
    let forked = json!({
        "command": "fork", "task": "lr1e-3", "at": 2, "weights_only": true, "changes": { "lr": "1e-4", "warmup": "2" },
    });
    assert_eq!(run.asked.recv().unwrap(), forked);
    browser.wait_until("document.getElementById('ask').open === false");

    // Without the token the dashboard is read-only.
    let stranger = format!("http://localhost:{}/", served.address.rsplit_once(':').unwrap().1);
    browser.go(&stranger);
    browser.wait_until(&format!("{row} !== null"));
    assert_eq!(
        browser.value("[...document.querySelectorAll('.acts button')].every((button) => button.disabled)"),
        true
    );
}

#[test]
fn tasks_are_sorted_filtered_coloured_and_drawn_by_their_settings() {
    let Some(browser) = Browser::open() else {
        return eprintln!("skipped: there is no chromedriver here");
    };
    let root = tempfile::tempdir().unwrap();
    let _served = browser.show(&ended(root.path()));
    let first = "document.querySelector('#tasks tbody tr')?.dataset.task";
    browser.wait_until(&format!("{first} === 'lr1e-3'"));
    let heads = "[...document.querySelectorAll('#tasks th[data-column]')].map((head) => head.dataset.column)";
    let heads = browser.value(heads);
    assert_eq!(
        heads,
        json!(["rank", "task", "lr", "state", "steps", "training", "validation", "test", "from"]),
        "a column for each setting that differs, and none for constant ones"
    );
    assert_eq!(browser.value("document.querySelectorAll('#parallel path').length"), 2);
    browser.click("[data-sort=\"lr\"]");
    browser.wait_until(&format!("{first} === 'lr3e-4'"));
    assert_eq!(browser.value("document.querySelector('th[data-column=lr]').ariaSort"), "ascending");
    // A click on a value of an axis shows only its tasks, and another one all of them.
    let rows = "document.querySelectorAll('#tasks tbody tr').length";
    let values = "[...document.querySelectorAll('#parallel .value')].map((value) => value.firstChild.data)";
    assert_eq!(browser.value(values), json!(["3e-4", "1e-3"]));
    let click = "document.querySelector('#parallel .value').dispatchEvent(new MouseEvent('click'))";
    browser.value(click);
    assert_eq!((browser.value(rows), browser.value(first)), (1.into(), "lr3e-4".into()));
    assert_eq!(browser.value("document.querySelector('[data-filter=lr]').value"), "0");
    assert_eq!(browser.value("document.querySelectorAll('#parallel path').length"), 1);
    browser.value(click);
    assert_eq!(browser.value(rows), 2);
    let colour = "document.querySelector('tr[data-task=\"lr1e-3\"] .swatch').style.background";
    let own = browser.value(colour);
    browser.value(
        "(() => { const by = document.getElementById('colour-by'); by.value = 'lr'; by.dispatchEvent(new Event('input')); })()",
    );
    assert_ne!(browser.value(colour), own);
    let key = browser.value("document.getElementById('key').textContent");
    assert_eq!(key, "lr: 3e-41e-3", "a legend names the setting");
}

/// Twelve tasks that train until they are stopped.
fn long(dir: &Path) -> Running {
    let rates: Vec<String> = (1..=12).map(|rate| format!("{rate}e-4")).collect();
    let flags = "select --model bytes-tiny --batch 2 --context 16 --steps 100000 --eval-limit 1 --no-initial-validation \
                 --devices cpu:2x1 --device-memory 64MiB --reserve-for-forks --progress none";
    let (rates, out) = (rates.join(","), dir.to_str().unwrap());
    let flags: Vec<&str> = flags.split_whitespace().chain(["--lr", &rates, "--out", out]).collect();
    let run = Running::new(spawn(&flags, Stdio::null()));
    wait_for(|| dir.join("control.sock").exists());
    run
}

#[test]
fn a_run_of_twelve_tasks_is_controlled_by_clicking() {
    let Some(browser) = Browser::open() else {
        return eprintln!("skipped: there is no chromedriver here");
    };
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let run = long(&dir);
    let _served = browser.show(&dir);
    let minibatches = |task: &str| {
        format!(
            "parseInt(document.querySelector('tr[data-task=\"{task}\"]').querySelector('[data-cell=\"steps\"]').innerText)"
        )
    };
    browser.wait_until("document.querySelectorAll('#tasks tbody tr').length === 12");
    for task in ["lr1e-4", "lr1.2e-3"] {
        let before = browser.value(&minibatches(task));
        browser.wait_until(&format!("{} > {before}", minibatches(task)));
    }
    let asks = |what: &str, fields: &[(&str, &str)]| {
        browser.click(&format!("[data-act=\"{what}\"]"));
        for (field, text) in fields {
            browser.value(&format!("document.getElementById('ask-{field}').value = '{text}'"));
        }
        browser.click("#ask-yes");
        browser.wait_until("document.getElementById('ask').open === false");
    };
    let has_state = |task: &str, state: &str| {
        browser.wait_until(&format!(
            "document.querySelector('tr[data-task=\"{task}\"]')?.querySelector('[data-cell=\"state\"]').innerText === '{state}'"
        ));
    };
    browser.click("[data-act=\"pause lr1e-4\"]");
    has_state("lr1e-4", "paused");
    let place = browser.value(&minibatches("lr1e-4"));
    asks("fork lr1e-4", &[("name", "mine"), ("changes", "lr=5e-5")]);
    browser.wait_until(&format!(
        "document.querySelector('tr[data-task=\"mine\"]')?.querySelector('[data-cell=\"from\"]').innerText === 'lr1e-4 at {place}'"
    ));
    asks("stop lr1e-4", &[]);
    has_state("lr1e-4", "stopped");
    asks("delete lr2e-4", &[]);
    has_state("lr2e-4", "deleted");
    asks("extend lr3e-4", &[("name", "longer"), ("steps", "100001")]);
    browser.wait_until(
        "document.querySelector('tr[data-task=\"longer\"]')?.querySelector('[data-cell=\"from\"]').innerText.startsWith('lr3e-4 at')",
    );
    assert_eq!(browser.value("document.getElementById('problem').hidden"), true);
    for row in ctl(&dir, "status")["tasks"].as_array().unwrap() {
        if ["waiting", "running", "paused"].iter().any(|open| row["state"] == *open) {
            ctl(&dir, &format!("stop {}", row["task"].as_str().unwrap()));
        }
    }
    assert!(run.output().status.success());
    let commands = std::fs::read_to_string(dir.join("control.jsonl")).unwrap();
    for command in ["pause", "fork", "stop", "delete", "extend"] {
        assert!(commands.contains(&format!("\"command\":\"{command}\"")), "{command} in {commands}");
    }
    let report = read_json(&dir.join("report.json"));
    let mine = report["tasks"].as_array().unwrap().iter().find(|task| task["name"] == "mine").unwrap();
    assert_eq!((&mine["state"], &mine["config"]["lr"]), (&"stopped".into(), &5e-5.into()), "{mine}");
}

#[test]
fn models_answer_a_prompt_next_to_each_other() {
    let Some(browser) = Browser::open() else {
        return eprintln!("skipped: there is no chromedriver here");
    };
    let root = tempfile::tempdir().unwrap();
    let dir = ended(root.path());
    let _served = browser.show(&dir);
    browser.wait_until("document.getElementById('asking-section')?.hidden === false");
    let fill =
        |id: &str, text: &str| browser.value(&format!("document.getElementById('{id}').value = '{text}'"));
    fill("asking-text", "--the ship");
    fill("asking-tokens", "7");
    browser.click("#asking-yes");
    let is_over = |rows: usize| {
        browser.wait_until(&format!(
            "document.querySelectorAll('#asked tbody tr').length === {rows} && !document.getElementById('asking-yes').disabled"
        ));
    };
    is_over(1);
    let texts = |selector: &str| {
        browser
            .value(&format!("[...document.querySelectorAll('{selector}')].map((cell) => cell.textContent)"))
    };
    let report = read_json(&dir.join("report.json"));
    let heads = texts("#asked thead th");
    let answers = texts("#asked tbody td");
    assert_eq!(
        (heads.as_array().unwrap().len(), &heads[0], &answers[0]),
        (3, &json!("prompt"), &json!("--the ship"))
    );
    for column in 1..3 {
        let task =
            report["tasks"].as_array().unwrap().iter().find(|task| task["name"] == heads[column]).unwrap();
        let model = task["model_dir"].as_str().unwrap();
        let made =
            says(&["generate", "--model", model, "--prompt=--the ship", "--max-new-tokens", "7", "--json"]);
        assert_eq!(answers[column], serde_json::from_str::<Value>(&made).unwrap()["text"]);
    }
    // The models have no chat template.
    browser.click("#asking-chat");
    browser.click("#asking-yes");
    is_over(2);
    let refused = texts("#asked tbody tr:last-child td");
    assert!(refused[1].as_str().unwrap().contains("chat template"), "{refused}");
}
