//! Tests of rows and lines on sequences of events with given times, and of bars on a virtual terminal.

use super::lines::Lines;
use super::run_state::{RunState, Task};
use super::ticker::Ticker;
use super::{Display, Outside, Preparation, Progress, RequestedMinibatches, Show, bars};
use hydra_core::{DeviceId, TaskId};
use hydra_engine::{Evaluation, EvaluationKind, Observer, RunEvent, Span, TaskState, Track, Work};
use hydra_partition::PilotProgress;
use indicatif::{MultiProgress, ProgressDrawTarget, TermLike};
use std::convert::Infallible;
use std::io;
use std::num::NonZero;
use std::sync::{Arc, Mutex, mpsc};

/// Minibatches of each task, and tokens of each minibatch.
const STEPS: usize = 200;
const TOKENS: usize = 1000;

fn tasks(count: usize) -> Vec<Task> {
    let name = |index| format!("b{}-lr{}e-4", 8 + index / 10, index % 10);
    (0..count).map(|index| Task::new(&name(index), "tokens", STEPS, (STEPS * TOKENS) as u64)).collect()
}

fn waiting(count: usize) -> RunState {
    let mut run = RunState::default();
    run.expect(tasks(count), ["cpu:0", "cpu:1"].into_iter());
    run
}

fn minibatch(task: usize, step: usize) -> RunEvent<'static> {
    let (task, loss) = (TaskId(task), 4.5 - step as f64 / 100.0);
    RunEvent::Minibatch { task, step, steps: STEPS, loss, rate: 1e-3, units: TOKENS, at_s: 0.0 }
}

fn evaluating(task: usize, kind: EvaluationKind, batch: usize) -> RunEvent<'static> {
    RunEvent::Evaluating { task: TaskId(task), kind, batch, batches: 240, units: TOKENS, at_s: 0.0 }
}

fn evaluated(task: usize, kind: EvaluationKind, step: usize, perplexity: f64) -> RunEvent<'static> {
    let metrics = Default::default();
    let result = Evaluation {
        loss: perplexity.ln(),
        perplexity: Some(perplexity),
        loss_targets: 99,
        metrics,
        selected_by: None,
        rows: Vec::new(),
        rounds: None,
    };
    RunEvent::Evaluated { task: TaskId(task), kind, step, result, at_s: 0.0 }
}

fn ended(task: usize, state: TaskState) -> RunEvent<'static> {
    let error =
        (state == TaskState::Failed).then_some("the loss is NaN at minibatch 20:\ngive a smaller --lr");
    RunEvent::Ended { task: TaskId(task), state, error, written: (None, None), at_s: 0.0 }
}

fn span(device: usize, start_s: f64, end_s: f64) -> RunEvent<'static> {
    let (track, task, work) = (Track::Compute(DeviceId(device)), TaskId(0), Work::Forward);
    RunEvent::Span(Span { track, task, work, shard: 0, step: 0, microbatch_pass: 0, start_s, end_s })
}

/// Sixty tasks on two devices: 12 are done, one has failed, 16 are running, 31 wait.
fn sixty() -> Vec<(RunEvent<'static>, f64)> {
    let mut events = Vec::new();
    let mut at_s = 0.0;
    let mut tell = |event, seconds: f64| {
        at_s += seconds;
        events.push((event, at_s));
    };
    for task in 0..13 {
        tell(evaluated(task, EvaluationKind::Initial, 0, 256.0), 1.0);
        let until = if task == 5 { 20 } else { STEPS };
        (0..until).for_each(|step| tell(minibatch(task, step), 0.05));
        if task == 5 {
            tell(ended(task, TaskState::Failed), 0.0);
            continue;
        }
        let perplexity = if task == 9 { 5.6 } else { 20.0 + task as f64 };
        tell(evaluated(task, EvaluationKind::Validation, STEPS, perplexity), 1.0);
        tell(evaluated(task, EvaluationKind::Test, STEPS, perplexity + 0.5), 1.0);
        tell(ended(task, TaskState::Done), 0.0);
    }
    for step in 0..50 {
        (13..29).for_each(|task| tell(minibatch(task, step), 0.05));
    }
    tell(span(0, 0.0, 150.0), 0.0);
    tell(span(1, 20.0, 200.0), 0.0);
    events
}

fn run_of(tasks: usize, events: &[(RunEvent<'_>, f64)]) -> RunState {
    let mut run = waiting(tasks);
    events.iter().for_each(|(event, at_s)| run.observe(event, *at_s));
    run
}

fn row<'a>(rows: &'a [String], part: &str) -> &'a str {
    let mut found = rows.iter().filter(|row| row.contains(part));
    let first = found.next().unwrap_or_else(|| panic!("no row with {part:?} in {rows:#?}"));
    assert_eq!(found.next(), None, "{part:?}");
    first
}

/// A terminal in memory, whose rows can be read.
#[derive(Clone)]
struct VirtualTerminal(Arc<Mutex<vt100::Parser>>);

impl std::fmt::Debug for VirtualTerminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VirtualTerminal")
    }
}

impl VirtualTerminal {
    fn new(rows: u16, columns: u16) -> Self {
        let [rows, columns] = [rows, columns].map(|size| NonZero::new(size).unwrap());
        Self(Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 1000))))
    }

    fn take(&self, bytes: &str) -> io::Result<()> {
        self.0.lock().unwrap().process(bytes.as_bytes());
        Ok(())
    }

    /// The rows, and the number of rows that were scrolled off.
    fn read(&self) -> (Vec<String>, usize) {
        let parser = self.0.lock().unwrap();
        let screen = parser.screen();
        let (_, columns) = screen.size();
        let rows = screen.rows(0, columns.get()).map(|row| row.trim_end().to_owned()).collect();
        (rows, screen.scrollback_len())
    }

    fn move_cursor(&self, by: usize, to: char) -> io::Result<()> {
        if by == 0 { Ok(()) } else { self.take(&format!("\x1b[{by}{to}")) }
    }
}

impl TermLike for VirtualTerminal {
    fn width(&self) -> u16 {
        self.0.lock().unwrap().screen().size().1.get()
    }

    fn height(&self) -> u16 {
        self.0.lock().unwrap().screen().size().0.get()
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.take(&format!("{text}\r\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.take(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.take("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The rows of a virtual terminal after all events, and the number of rows that were scrolled off.
fn drawn(size: fn() -> (u16, u16), events: &[(RunEvent<'_>, f64)]) -> (Vec<String>, usize) {
    let (rows, columns) = size();
    let screen = VirtualTerminal::new(rows, columns);
    let told = FakeOutside::default();
    let mut display = told.display(Show::Bars, &screen, size);
    display.run = waiting(60);
    for (event, at_s) in events {
        told.clock_is(*at_s);
        display.observe(event);
    }
    drop(display);
    screen.read()
}

/// A clock that tests set, and the printed lines.
#[derive(Clone, Default)]
struct FakeOutside {
    now_s: Arc<Mutex<f64>>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl FakeOutside {
    fn clock_is(&self, now_s: f64) {
        *self.now_s.lock().unwrap() = now_s;
    }

    fn display(&self, show: Show, screen: &VirtualTerminal, size: fn() -> (u16, u16)) -> Display {
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let (now_s, lines) = (self.now_s.clone(), self.lines.clone());
        let clock = Box::new(move || *now_s.lock().unwrap());
        let say = Box::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()));
        Display::new(MultiProgress::with_draw_target(target), show, Outside { size, clock, say })
    }

    /// The terminal after these events of a run with one task, and `seconds` seconds without events.
    fn after_silence(&self, show: Show, events: &[(RunEvent<'_>, f64)], seconds: usize) -> Vec<String> {
        let screen = VirtualTerminal::new(24, 80);
        let mut display = self.display(show, &screen, || (24, 80));
        display.run = waiting(1);
        let (go, goes) = mpsc::channel();
        let now_s = self.now_s.clone();
        let is_last = move |_: &mpsc::Receiver<Infallible>| {
            let ended = goes.recv().is_err();
            *now_s.lock().unwrap() += 1.0;
            ended
        };
        let mut progress = Progress::of(display, |tick| Some(Ticker::after(is_last, tick)));
        for (event, at_s) in events {
            self.clock_is(*at_s);
            progress.observe(event);
        }
        (0..seconds).for_each(|_| go.send(()).unwrap());
        drop(go);
        // The display stays alive, so that it does not draw its end.
        let display = progress.display.clone();
        drop(progress);
        let rows = screen.read().0;
        drop(display);
        rows
    }
}

#[test]
fn on_a_terminal_time_goes_on_while_nothing_happens() {
    let events = [(minibatch(0, 189), 0.0), (minibatch(0, 190), 10.0)];
    let after = |seconds| FakeOutside::default().after_silence(Show::Bars, &events, seconds);
    for (seconds, left, gone) in [(0, "1m30s left", "10s elapsed"), (3, "1m27s left", "13s elapsed")] {
        let rows = after(seconds);
        assert!(rows[0].contains(left) && rows[0].ends_with(gone), "{rows:#?}");
        assert!(row(&rows[2..], "b8-lr0e-4").contains(left), "{rows:#?}");
    }
    let rows = after(25);
    assert!(
        rows[0].contains("1m20s left"),
        "a minibatch that takes longer than the others is one yet: {rows:#?}"
    );
    assert!(rows[0].ends_with("35s elapsed"), "{rows:#?}");
}

#[test]
fn in_a_pipe_the_whole_is_told_every_ten_seconds_while_nothing_happens() {
    let told = FakeOutside::default();
    told.after_silence(Show::Lines, &[(minibatch(0, 0), 1.0), (minibatch(0, 1), 3.0)], 18);
    let whole = |left, gone| {
        format!("total: 2 of 200 minibatches, 500 tokens/s, {left} left, {gone}s elapsed; 1 running")
    };
    assert_eq!(*told.lines.lock().unwrap(), [whole("6m34s", 10), whole("6m34s", 20)]);
    let told = FakeOutside::default();
    told.after_silence(Show::Nothing, &[(minibatch(0, 0), 1.0)], 30);
    assert!(told.lines.lock().unwrap().is_empty());
}

#[test]
fn sixty_tasks_find_room_on_24_rows() {
    let (screen, gone) = drawn(|| (24, 80), &sixty());
    assert_eq!(gone, 0, "nothing is pushed off the terminal: {screen:#?}");
    let rows = bars::rows(&run_of(60, &sixty()), 79, 23);
    assert_eq!(screen[..23], rows[..], "what is drawn is what is meant");
    assert_eq!(screen[23], "");
    // 12 * 200 + 20 + 16 * 50 of 60 * 200 minibatches.
    assert!(rows[0].starts_with("total ██░░░░░░ 3220/12000  26%  "), "{rows:#?}");
    assert_eq!(rows[1], "60 tasks: 16 running, 31 waiting, 12 done, 1 failed  cpu:0 75%  cpu:1 90%");
    assert_eq!(rows[2], "best so far: b8-lr9e-4, validation perplexity 5.60");
    assert_eq!(rows[22], "41 others: 31 waiting, 10 done");
    assert!(
        row(&rows[3..], "b8-lr9e-4").ends_with("200/200    done  val ppl 5.60  test ppl 6.10"),
        "{rows:#?}"
    );
    assert!(
        row(&rows, "b8-lr5e-4").contains("20/200    failed: the loss is NaN at minibatch 20: give"),
        "{rows:#?}"
    );
    let running = rows.iter().filter(|row| row.contains(" 50/200 ")).count();
    assert_eq!(running, 16, "{rows:#?}");
    assert!(rows.iter().all(|row| !row.contains(" 0s left")), "{rows:#?}");
}

#[test]
fn a_large_terminal_shows_more_of_them_in_whole_words() {
    let (screen, gone) = drawn(|| (50, 200), &sixty());
    assert_eq!(gone, 0, "{screen:#?}");
    assert!(screen[48].contains("others: "), "{screen:#?}");
    assert_eq!(screen.iter().filter(|row| row.contains("/200")).count(), 45, "{screen:#?}");
    let best = row(&screen[3..], "b8-lr9e-4");
    assert!(best.ends_with("done  validation perplexity 5.60  test perplexity 6.10"), "{best}");
    let running = row(&screen, "b9-lr3e-4");
    assert!(running.contains("training loss 4.0100"), "{running}");
    assert_eq!(
        screen.iter().filter(|row| row.contains("/200") && row.ends_with("waiting")).count(),
        16,
        "{screen:#?}"
    );
}

#[test]
fn rows_are_never_wider_nor_more_than_the_terminal() {
    let run = run_of(60, &sixty());
    for width in [0, 1, 10, 40, 79, 109, 110, 199] {
        for height in [0, 1, 2, 3, 4, 5, 23, 62, 63, 64, 200] {
            let rows = bars::rows(&run, width, height);
            assert_eq!(rows.len(), height.min(63), "{width} {height}: {rows:#?}");
            assert!(rows.iter().all(|row| row.chars().count() <= width), "{width} {height}: {rows:#?}");
        }
    }
}

#[test]
fn after_an_interrupt_nothing_says_that_it_is_complete() {
    let mut events: Vec<_> = (0..10).map(|step| (minibatch(0, step), step as f64)).collect();
    events.push((RunEvent::Stopping, 10.0));
    let run = run_of(2, &events);
    assert!(row(&bars::rows(&run, 79, 23), "2 tasks:").contains("1 running, 1 waiting  stopping"));
    events.extend([(ended(0, TaskState::Stopped), 11.0), (ended(1, TaskState::Stopped), 11.0)]);
    let rows = bars::rows(&run_of(2, &events), 79, 23);
    assert!(rows[0].starts_with("total ░░░░░░░░ 10/400  2%  "), "{rows:#?}");
    assert!(rows[1].starts_with("2 tasks: 2 stopped"), "{rows:#?}");
    assert!(rows.iter().all(|row| !row.contains("left")), "{rows:#?}");
    assert!(row(&rows, "b8-lr0e-4").ends_with(" 10/200    stopped  train loss 4.4100"), "{rows:#?}");
}

#[test]
fn time_is_left_only_where_a_pace_was_measured() {
    let none_left = |run: &RunState| {
        let rows = bars::rows(run, 79, 23);
        assert!(rows.iter().all(|row| !row.contains("left") && !row.contains("tokens/s")), "{rows:#?}");
    };
    none_left(&waiting(3));
    let mut run = run_of(3, &[(evaluated(0, EvaluationKind::Initial, 0, 256.0), 5.0)]);
    none_left(&run);
    run.observe(&minibatch(0, 0), 6.0);
    none_left(&run);
    run.observe(&minibatch(0, 1), 8.0);
    let rows = bars::rows(&run, 79, 23);
    // 198 minibatches of 1000 tokens at 500 tokens a second, and 400 of those that wait.
    assert!(rows[0].contains("  19m56s left  500 tokens/s"), "{rows:#?}");
    assert!(row(&rows, "b8-lr0e-4").contains("  6m36s left  train loss 4.4900"), "{rows:#?}");
    assert!(row(&rows, "b8-lr1e-4").ends_with("░░░░░░░░     0/200    waiting"), "{rows:#?}");
    // When everything is trained, evaluations follow, whose number is not known.
    let all = |task| (0..STEPS).map(move |step| (minibatch(task, step), step as f64));
    none_left_of_whole(&run_of(3, &(0..3).flat_map(all).collect::<Vec<_>>()));
}

fn none_left_of_whole(run: &RunState) {
    let rows = bars::rows(run, 79, 23);
    assert!(rows[0].contains("600/600  100%") && !rows[0].contains("left"), "{rows:#?}");
}

#[test]
fn a_task_that_was_done_early_leaves_nothing_of_the_whole_to_do() {
    let mut events: Vec<_> = (0..50).map(|step| (minibatch(0, step), step as f64)).collect();
    events.push((ended(0, TaskState::Done), 50.0));
    let rows = bars::rows(&run_of(1, &events), 79, 23);
    assert!(rows[0].contains("50/50  100%"), "{rows:#?}");
    assert!(rows[2].ends_with(" 50/200    done early"), "{rows:#?}");
}

#[test]
fn every_figure_of_a_task_has_its_name_and_the_best_is_kept() {
    let mut run = waiting(1);
    let mut says = |event: RunEvent<'_>, at_s: f64, shown: &str| {
        run.observe(&event, at_s);
        let rows = bars::rows(&run, 79, 23);
        assert!(rows.last().unwrap().ends_with(shown), "{shown}: {rows:#?}");
    };
    says(evaluating(0, EvaluationKind::Initial, 0), 1.0, "validating 1/240");
    says(evaluating(0, EvaluationKind::Initial, 60), 61.0, "validating 61/240  2m59s left");
    says(evaluated(0, EvaluationKind::Initial, 0, 256.0), 240.0, "  initial val ppl 256.00");
    says(minibatch(0, 0), 241.0, "train loss 4.5000  initial val ppl 256.00");
    says(evaluated(0, EvaluationKind::Periodic, 1, 5.6), 242.0, "train loss 4.5000  val ppl 5.60");
    says(evaluated(0, EvaluationKind::Periodic, 1, 7.0), 243.0, "train loss 4.5000  best val ppl 5.60");
    says(evaluating(0, EvaluationKind::Test, 0), 244.0, "testing 1/240  best val ppl 5.60");
    says(evaluated(0, EvaluationKind::Validation, 1, 5.6), 245.0, "train loss 4.5000  val ppl 5.60");
    says(evaluated(0, EvaluationKind::Test, 1, 6.0), 246.0, "train loss 4.5000  val ppl 5.60  test ppl 6.00");
    says(ended(0, TaskState::Done), 247.0, "done early  val ppl 5.60  test ppl 6.00");
}

#[test]
fn where_there_is_room_the_last_validation_stands_beside_the_best() {
    let told = [5.6, 7.0].map(|perplexity| (evaluated(0, EvaluationKind::Periodic, 1, perplexity), 1.0));
    let rows = bars::rows(&run_of(1, &told), 199, 23);
    let shown = "best validation perplexity 5.60  last validation perplexity 7.00";
    assert!(rows.last().unwrap().ends_with(shown), "{rows:#?}");
}

#[test]
fn a_run_that_goes_on_counts_what_was_trained_and_not_its_time() {
    let mut run = waiting(1);
    let resumed = RunEvent::Resumed { task: TaskId(0), step: 150, steps: STEPS, at_s: 0.0 };
    run.observe(&resumed, 1.0);
    assert!(bars::rows(&run, 79, 23)[2].ends_with(" 150/200    waiting for initial weights"));
    run.observe(&minibatch(0, 150), 2.0);
    run.observe(&minibatch(0, 151), 3.0);
    let rows = bars::rows(&run, 79, 23);
    assert!(rows[0].contains("152/200  76%  48s left  1.0k tokens/s"), "{rows:#?}");
}

#[test]
fn an_evaluation_alone_is_one_row() {
    let mut run = RunState::default();
    run.expect(vec![Task::new("gpt2", "tokens", 0, 0)], ["cpu:0"].into_iter());
    run.observe(&evaluating(0, EvaluationKind::Test, 0), 2.0);
    run.observe(&evaluating(0, EvaluationKind::Test, 60), 122.0);
    assert_eq!(bars::rows(&run, 79, 23), ["gpt2 ██░░░░░░    61/240    5m58s left  500 tokens/s"]);
}

#[test]
fn the_pilot_pass_has_a_row_of_its_own_until_it_ends() {
    let mut run = RunState::default();
    let pilot = |progress| RunEvent::Pilot { task: "gpt2", progress };
    run.observe(&pilot(PilotProgress::Measured { done: 12, layers: 48 }), 1.0);
    assert_eq!(bars::rows(&run, 79, 23), ["gpt2 ██░░░░░░ 12/48  layers measured"]);
    let line = Lines::default().after(&pilot(PilotProgress::Verified { done: 3, layers: 48 }), &run);
    assert!(line.is_empty(), "ten seconds have not gone");
    run.observe(&pilot(PilotProgress::Verified { done: 3, layers: 48 }), 10.0);
    let line = Lines::default().after(&pilot(PilotProgress::Verified { done: 3, layers: 48 }), &run);
    assert_eq!(line, ["gpt2: 3 of 48 layers verified in shards"]);
    run.observe(&pilot(PilotProgress::Verified { done: 48, layers: 48 }), 11.0);
    assert!(bars::rows(&run, 79, 23).is_empty());
}

#[test]
fn before_anything_is_measured_it_is_said_that_files_are_read() {
    let mut run = RunState::default();
    run.now_s = 12.0;
    assert_eq!(bars::rows(&run, 79, 23), ["reading models and data, 12s elapsed"]);
    assert_eq!(Lines::default().due(&run).unwrap(), "reading models and data, 12s elapsed");
}

#[test]
fn the_time_that_is_left_has_the_evaluations_to_come() {
    let tokens = TOKENS as f64;
    let task = Task::new("a", "tokens", STEPS, (STEPS * TOKENS) as u64).with_evaluations(tokens / 2.0, 100);
    let mut run = RunState::default();
    run.expect(vec![task], ["cpu:0"].into_iter());
    run.observe(&minibatch(0, 0), 1.0);
    run.observe(&minibatch(0, 1), 3.0);
    // 198 minibatches and the work of 50 at 2 s each.
    assert_eq!(run.left_s(), Some(496.0));
    run.observe(&evaluating(0, EvaluationKind::Validation, 79), 83.0);
    assert_eq!(run.left_s(), Some((198.0 + 10.0) * 2.0), "80 batches have taken the time of 40 minibatches");
    run.observe(&evaluating(0, EvaluationKind::Initial, 9), 83.0);
    assert_eq!(run.left_s(), Some((198.0 + 10.0) * 2.0), "those before training are not in it");
}

#[test]
fn what_a_task_waits_for_is_said() {
    let began = |task| RunEvent::Began { task: TaskId(task), at_s: 0.0 };
    let mut run = waiting(3);
    let cells = |run: &RunState| -> Vec<String> {
        let rows = bars::rows(run, 79, 23);
        rows[2..].iter().map(|row| row.split("  ").last().unwrap().to_owned()).collect()
    };
    assert_eq!(run.counts_with_reasons(), "3 waiting for initial weights");
    run.observe(&began(0), 1.0);
    assert_eq!(
        cells(&run),
        ["waiting for a device", "waiting for initial weights", "waiting for initial weights"]
    );
    run.observe(&span(0, 0.0, 1.0), 2.0);
    assert_eq!(cells(&run), ["waiting for a device", "waiting for host memory", "waiting for host memory"]);
    run.observe(&minibatch(0, 0), 3.0);
    run.now_s = 20.0;
    let line = Lines::default().due(&run).unwrap();
    assert!(line.ends_with("; 1 running, 2 waiting for host memory"), "{line}");
}

#[test]
fn what_a_run_took_before_it_computes_is_said_once() {
    let told = FakeOutside::default();
    let mut display = told.display(Show::Lines, &VirtualTerminal::new(24, 80), || (24, 80));
    display.run = waiting(1);
    display.run.preparation = Some(Preparation { reading_s: 2.0, measuring_s: 61.0 });
    told.clock_is(4.0);
    display.observe(&RunEvent::Began { task: TaskId(0), at_s: 4.0 });
    assert!(told.lines.lock().unwrap().is_empty(), "its initial weights come first");
    display.observe(&span(0, 4.0, 4.0));
    display.observe(&minibatch(0, 0));
    let said =
        "prepared in 1m07s: 2s to read models and data, 1m01s to measure and plan, 4s for initial weights";
    assert_eq!(*told.lines.lock().unwrap(), [said]);
}

#[test]
fn in_lines_evaluations_and_ends_are_told_and_every_ten_seconds_the_whole() {
    let (mut run, mut lines) = (waiting(3), Lines::default());
    let mut says = |event: RunEvent<'_>, at_s: f64, told: &[&str]| {
        run.observe(&event, at_s);
        assert_eq!(lines.after(&event, &run), told);
    };
    says(evaluating(0, EvaluationKind::Initial, 0), 1.0, &[]);
    says(
        evaluating(0, EvaluationKind::Initial, 60),
        10.0,
        &[
            "total: 0 of 600 minibatches, 10s elapsed; 1 running, 2 waiting; evaluation of b8-lr0e-4: 61 of 240 batches",
        ],
    );
    says(
        evaluated(0, EvaluationKind::Initial, 0, 256.0),
        11.0,
        &["b8-lr0e-4: validation perplexity 256.00 (loss 5.5452) before training"],
    );
    says(minibatch(0, 0), 12.0, &[]);
    says(minibatch(0, 1), 14.0, &[]);
    says(
        evaluated(0, EvaluationKind::Periodic, 2, 8.0),
        15.0,
        &["b8-lr0e-4: validation perplexity 8.00 (loss 2.0794) after 2 of 200 minibatches, the best so far"],
    );
    says(
        evaluated(0, EvaluationKind::Periodic, 2, 9.0),
        19.9,
        &["b8-lr0e-4: validation perplexity 9.00 (loss 2.1972) after 2 of 200 minibatches"],
    );
    says(
        ended(0, TaskState::Failed),
        20.0,
        &[
            "b8-lr0e-4: failed after 2 of 200 minibatches: the loss is NaN at minibatch 20: give a smaller --lr",
            "total: 2 of 600 minibatches, 500 tokens/s, 13m18s left, 20s elapsed; 2 waiting, 1 failed; best so far: \
             b8-lr0e-4, validation perplexity 8.00",
        ],
    );
    says(minibatch(1, 0), 29.9, &[]);
    says(ended(1, TaskState::Stopped), 29.9, &["b8-lr1e-4: stopped after 1 of 200 minibatches"]);
    says(ended(2, TaskState::Done), 29.9, &["b8-lr2e-4: done early after 0 of 200 minibatches"]);
}

#[test]
fn of_a_search_those_minibatches_count_that_it_has_asked_for() {
    let asked = RequestedMinibatches::default();
    let mut run = waiting(3);
    run.asked = Some(asked.clone());
    asked.set(90);
    // The third is forked where the first one has 30.
    asked.fork(&run.tasks[2].name.clone(), 30);
    (0..40).for_each(|step| run.observe(&minibatch(0, step), 1.0 + step as f64));
    run.observe(&RunEvent::Resumed { task: TaskId(2), step: 30, steps: STEPS, at_s: 0.0 }, 41.0);
    (30..35).for_each(|step| run.observe(&minibatch(2, step), 50.0 + step as f64));
    assert_eq!(run.minibatches(), (45, 90));
    assert_eq!(run.left_s(), None, "losses decide what else is trained");
    let rows = bars::rows(&run, 120, 20);
    let whole = row(&rows, "total ");
    assert!(whole.contains("45/90  requested so far  ") && !whole.contains('%'), "{whole}");
    assert!(rows.iter().all(|row| !row.contains(" left")), "{rows:#?}");
    let line = Lines::default().due(&run).unwrap();
    assert!(line.starts_with("total: 45 of 90 minibatches requested so far, "), "{line}");
    asked.set(200);
    assert_eq!(run.minibatches(), (45, 200));
}
