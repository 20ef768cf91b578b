//! Draws the terminal dashboard, for a terminal of any size.

use super::view::{Choices, View, parallel, setting};
use hydra_core::ByteSize;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph, Row, Table};
use serde_json::Value;

/// The colours of the tasks; they repeat if there are more tasks.
const COLOURS: [Color; 6] =
    [Color::Blue, Color::Red, Color::Green, Color::Magenta, Color::Cyan, Color::Yellow];

/// The minimum height of the plot in rows; with less space only the table is drawn.
const MIN_PLOT_ROWS: u16 = 8;

/// Draws all parts.
pub(super) fn all(frame: &mut Frame, view: &View) {
    let gauges = view.devices.len().max(view.tiers.len()) as u16;
    let gauges = if gauges > 0 { gauges.min(8) + 2 } else { 0 };
    let left = frame.area().height.saturating_sub(gauges + 2);
    let tasks = (view.tasks.len() as u16 + 3).min((left / 2).max(left.saturating_sub(16)));
    let curves =
        if left > tasks + MIN_PLOT_ROWS { Constraint::Min(MIN_PLOT_ROWS) } else { Constraint::Length(0) };
    let parts = [
        Constraint::Length(1),
        curves,
        Constraint::Max(left.max(3)),
        Constraint::Length(gauges),
        Constraint::Length(1),
    ];
    let parts = if left > tasks + MIN_PLOT_ROWS {
        [parts[0], parts[1], Constraint::Length(tasks), parts[3], parts[4]]
    } else {
        parts
    };
    let [title, curves, tasks, gauges, keys] = Layout::vertical(parts).areas(frame.area());
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Line::styled(view.title.as_str(), bold), title);
    match (curves.height, view.chosen.parallel) {
        (0, _) => {}
        (_, true) => coordinates(frame, view, curves),
        (_, false) => losses(frame, view, curves),
    }
    leaderboard(frame, view, tasks);
    let [devices, memory] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(gauges);
    let busy: Vec<(String, f64)> =
        view.devices.iter().map(|(name, share)| (labelled(name, *share), *share)).collect();
    bars(frame, "devices, the last 10 s", &busy, devices);
    let reserved = view.tiers.iter().map(|tier| {
        let (bytes, budget) = (ByteSize(tier.reserved_bytes), ByteSize(tier.budget_bytes));
        let share = tier.reserved_bytes as f64 / tier.budget_bytes.max(1) as f64;
        (format!("{} {bytes} of {budget}", tier.name), share)
    });
    let reserved: Vec<(String, f64)> = reserved.collect();
    bars(frame, "memory", &reserved, memory);
    let help = match view.chosen.typing {
        true => {
            format!(
                "/{}_   filter: words such as lr=1e-3 or a part of a name   enter: apply   esc: clear",
                view.chosen.filter
            )
        }
        false => {
            "q quit  l log axis  p losses/settings  s sort  r reverse  / filter  up, down scroll".to_owned()
        }
    };
    frame.render_widget(Paragraph::new(help), keys);
}

fn labelled(name: &str, share: f64) -> String {
    format!("{name} {:.0} %", 100.0 * share)
}

/// Returns the colour of a task: by its value of the colouring setting, or by its position if no setting differs.
fn colour(view: &View, task: &str) -> Color {
    let own = || view.curves.iter().position(|(name, _)| name == task).unwrap_or_default();
    let place = view.colours.get(task).copied().unwrap_or_else(own);
    COLOURS[place % COLOURS.len()]
}

/// Draws the tasks in parallel coordinates: an axis for each setting, and one for the result.
fn coordinates(frame: &mut Frame, view: &View, area: Rect) {
    let lines = parallel(&view.settings, &view.tasks);
    let points: Vec<(Color, Vec<(f64, f64)>)> = lines
        .iter()
        .map(|(name, places)| {
            let points = places.iter().enumerate().map(|(axis, place)| (axis as f64, *place));
            (colour(view, name), points.collect())
        })
        .collect();
    let sets = points.iter().map(|(colour, points)| {
        let line = Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line);
        line.style(Style::new().fg(*colour)).data(points)
    });
    let names = view.settings.iter().cloned().chain(["result".to_owned()]);
    let x = Axis::default().bounds([0.0, view.settings.len().max(1) as f64]).labels(names);
    let y = Axis::default().bounds([0.0, 1.0]).labels(["low", "high"]);
    let title = "settings and results, best at the top";
    let chart = Chart::new(sets.collect()).block(Block::bordered().title(title));
    frame.render_widget(chart.x_axis(x).y_axis(y).legend_position(None), area);
}

fn losses(frame: &mut Frame, view: &View, area: Rect) {
    let scaled = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        let seen = points.iter().filter(|(_, loss)| !view.chosen.log || *loss > 0.0);
        seen.map(|(step, loss)| (*step, if view.chosen.log { loss.log10() } else { *loss })).collect()
    };
    let is_shown = |name: &str| view.tasks.iter().any(|task| task["name"] == name);
    let shown = view.curves.iter().filter(|(name, _)| is_shown(name));
    let curves: Vec<(Color, Vec<(f64, f64)>)> =
        shown.map(|(name, points)| (colour(view, name), scaled(points))).collect();
    let all = || curves.iter().flat_map(|(_, points)| points);
    let last = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let low = all().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let high = all().map(|(_, loss)| *loss).fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = if low < high { (low, high) } else { (low.min(0.0), low.max(0.0) + 1.0) };
    let (low, high) = if low.is_finite() && high.is_finite() { (low, high) } else { (0.0, 1.0) };
    let shown = |loss: f64| format!("{:.3}", if view.chosen.log { 10_f64.powf(loss) } else { loss });
    let sets = curves.iter().map(|(colour, points)| {
        let line = Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line);
        line.style(Style::new().fg(*colour)).data(points)
    });
    let x = Axis::default().bounds([0.0, last]).labels(["0".to_owned(), format!("{last:.0}")]);
    let y = Axis::default().bounds([low, high]).labels([low, (low + high) / 2.0, high].map(shown));
    let title = if view.chosen.log { "training loss (log)" } else { "training loss" };
    let chart = Chart::new(sets.collect()).block(Block::bordered().title(title));
    frame.render_widget(chart.x_axis(x).y_axis(y).legend_position(None), area);
}

fn leaderboard(frame: &mut Frame, view: &View, area: Rect) {
    let row = |task: &Value| {
        let name = task["name"].as_str().unwrap_or_default();
        let rank = task["rank"].as_u64().map_or("-".to_owned(), |rank| rank.to_string());
        let steps = match task["steps_in_all"].as_u64() {
            Some(all) => format!("{} / {all}", task["steps"]),
            None => task["steps"].to_string(),
        };
        let state = task["doing"].as_str().or(task["state"].as_str()).unwrap_or_default();
        let settings = view.settings.iter().map(|setting_name| setting(task, setting_name));
        let [rank, name] = [rank, name.to_owned()];
        let rest = [
            state.to_owned(),
            steps,
            number(&task["training_loss"]),
            measured(validation(task)),
            measured(&task["test"]),
        ];
        [rank, name].into_iter().chain(settings).chain(rest).collect()
    };
    let settings = view.settings.iter().map(String::as_str);
    let heads: Vec<&str> = ["", "task"]
        .into_iter()
        .chain(settings)
        .chain(["state", "minibatches", "training", "validation", "test"])
        .collect();
    let rows: Vec<Vec<String>> = view.tasks.iter().skip(view.chosen.first).map(row).collect();
    let mut least: Vec<u16> = heads.iter().map(|head| head.len() as u16).collect();
    least[0] = 4;
    let behind = heads.len() - 5;
    for (column, width) in [12, 15, 9, 10, 9].into_iter().enumerate() {
        least[behind + column] = width;
    }
    let widths = (0..heads.len()).map(|column| match column {
        1 => Constraint::Min(16),
        // The metrics of a model may be long.
        _ => {
            Constraint::Length(rows.iter().map(|row| row[column].len() as u16).fold(least[column], u16::max))
        }
    });
    let coloured = rows.iter().map(|row| Row::new(row.clone()).style(Style::new().fg(colour(view, &row[1]))));
    let table = Table::new(coloured, widths);
    let table = table.header(Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD)));
    frame.render_widget(table.block(Block::bordered().title(leaderboard_title(view))), area);
}

/// Returns the table's title, which names the sort column and the filter.
fn leaderboard_title(view: &View) -> String {
    let Choices { sort, filter, .. } = &view.chosen;
    let by = sort.0.checked_sub(1).and_then(|setting| view.settings.get(setting));
    let by = by.map_or_else(String::new, |name| format!(" by {name}"));
    let down = if sort.1 { ", reversed" } else { "" };
    let filter = if filter.is_empty() { String::new() } else { format!(", only {filter}") };
    format!("leaderboard{by}{down}{filter}")
}

fn number(value: &Value) -> String {
    value.as_f64().map_or("-".to_owned(), |value| format!("{value:.4}"))
}

/// Returns the loss and the metrics of an evaluation as text.
fn measured(evaluation: &Value) -> String {
    let metrics = evaluation["metrics"].as_object().into_iter().flatten();
    metrics.fold(number(&evaluation["loss"]), |shown, (name, value)| {
        format!("{shown}, {name} {}", number(value))
    })
}

/// Returns the validation of a task, or the latest evaluation while it trains.
fn validation(task: &Value) -> &Value {
    let last = || task["evaluations"].as_array().and_then(|all| all.last()).map(|last| &last[1]);
    match &task["validation"] {
        Value::Null => last().unwrap_or(&task["initial_validation"]),
        validation => validation,
    }
}

/// Draws a bar for each share, as many as fit.
fn bars(frame: &mut Frame, title: &str, shares: &[(String, f64)], area: Rect) {
    let block = Block::bordered().title(title.to_owned());
    let inside = block.inner(area);
    frame.render_widget(block, area);
    for ((label, share), y) in shares.iter().zip(inside.y..inside.bottom()) {
        let line = Rect { y, height: 1, ..inside };
        let gauge = Gauge::default().ratio(share.clamp(0.0, 1.0)).label(label.as_str());
        frame.render_widget(gauge.gauge_style(Style::new().fg(Color::Blue)), line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_run::run_dir::{METRICS, SPEC};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyCode;
    use serde_json::json;
    use std::fs;

    fn run() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(SPEC), "").unwrap();
        let minibatch = |task: &str, step: u64, loss: f64| json!({ "event": "minibatch", "task": task, "step": step, "steps": 40, "loss": loss, "units": 8, "at_s": step });
        let tiers = json!([{ "name": "host memory", "reserved_bytes": 1 << 20, "peak_bytes": 1 << 20, "budget_bytes": 4 << 20 }]);
        let trained = (0..30).flat_map(|step| {
            let loss = 5.0 / (step + 1) as f64;
            [minibatch("fast", step, loss), minibatch("slow", step, 2.0 * loss)]
        });
        let failed =
            json!({ "event": "end", "task": "slow", "state": "failed", "error": "broke", "at_s": 31.0 });
        let memory = json!({ "event": "memory", "tiers": tiers, "at_s": 31.0 });
        let evaluation = json!({
            "event": "evaluation", "task": "fast", "kind": "periodic", "step": 30, "at_s": 31.0, "loss": 0.25,
            "metrics": { "accuracy": 0.875 },
        });
        let lines: String =
            trained.chain([evaluation, failed, memory]).map(|line| format!("{line}\n")).collect();
        fs::write(dir.path().join(METRICS), lines).unwrap();
        dir
    }

    #[test]
    fn tasks_are_sorted_and_filtered_by_their_settings() {
        let dir = run();
        let task = |name: &str, lr: f64, optimizer: &str| {
            let training = json!({ "batch": 2, "optimizer": { "name": optimizer, "lr": lr } });
            let config = json!({ "batch": 2, "lr": lr, "training": training });
            json!({ "event": "task", "task": name, "config": config, "steps": 40, "at_s": 0.0 })
        };
        let lines = fs::read_to_string(dir.path().join(METRICS)).unwrap();
        let tasks = format!("{}\n{}\n", task("fast", 3e-3, "sgd"), task("slow", 1e-3, "adamw"));
        fs::write(dir.path().join(METRICS), tasks + &lines).unwrap();
        let mut view = View::new(dir.path()).unwrap();
        view.refresh().unwrap();
        let screen = drawn(&view, 120, 40);
        for part in ["lr", "optimizer", "3e-3", "adamw"] {
            assert!(screen.contains(part), "{part} in\n{screen}");
        }
        assert!(screen.find("fast") < screen.find("slow"));
        assert!(view.handle_key(KeyCode::Char('s')));
        let screen = drawn(&view, 120, 40);
        assert!(
            screen.contains("leaderboard by lr") && screen.find("slow") < screen.find("fast"),
            "{screen}"
        );
        assert!(view.handle_key(KeyCode::Char('r')));
        assert!(drawn(&view, 120, 40).contains("leaderboard by lr, reversed"));
        view.handle_key(KeyCode::Char('/'));
        "optimizer=sgd".chars().for_each(|char| assert!(view.handle_key(KeyCode::Char(char))));
        assert!(drawn(&view, 120, 40).contains("/optimizer=sgd_"));
        view.handle_key(KeyCode::Enter);
        let screen = drawn(&view, 120, 40);
        assert!(screen.contains("only optimizer=sgd") && !screen.contains("slow"), "{screen}");
        assert!(
            view.handle_key(KeyCode::Esc) && drawn(&view, 120, 40).contains("slow"),
            "escape clears the filter first"
        );
        view.handle_key(KeyCode::Char('p'));
        let screen = drawn(&view, 120, 40);
        assert!(screen.contains("settings and results") && screen.contains("result"), "{screen}");
        for (width, height) in [(80, 24), (40, 10), (1, 1)] {
            drawn(&view, width, height);
        }
        assert!(!view.handle_key(KeyCode::Esc));
    }

    fn drawn(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| all(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_run_is_drawn_with_its_curves_ranks_and_memory() {
        let dir = run();
        let mut view = View::new(dir.path()).unwrap();
        view.refresh().unwrap();
        let screen = drawn(&view, 110, 40);
        let parts = [
            "stopped; continue with hydra resume",
            "running time 31s",
            "training loss",
            "leaderboard",
            "fast",
            "30 / 40",
            "0.2500, accuracy 0.8750",
            "failed",
            "host memory 1.00 MiB of 4.00 MiB",
            "q quit",
        ];
        for part in parts {
            assert!(screen.contains(part), "{part:?} in\n{screen}");
        }
        assert!(screen.chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count() > 40, "{screen}");
        assert!(screen.find("fast") < screen.find("slow"));
        assert!(view.handle_key(KeyCode::Char('l')));
        assert!(drawn(&view, 110, 40).contains("training loss (log)"));
        assert!(view.handle_key(KeyCode::Down) && !drawn(&view, 110, 40).contains("fast"));
        assert!(!view.handle_key(KeyCode::Char('q')) && !view.handle_key(KeyCode::Esc));
    }

    #[test]
    fn the_title_of_a_search_has_the_requested_minibatches() {
        let dir = run();
        let spec = "format = 1\ncommand = 'select'\n[model]\n[training]\nbatch = [2]\nsteps = 40\n[search]\nsearch = 'halving'\n\
                    trials = 99\nsample = ['lr=log:1e-5..1e-2']\n[devices]\n";
        fs::write(dir.path().join(SPEC), spec).unwrap();
        let mut view = View::new(dir.path()).unwrap();
        view.refresh().unwrap();
        let screen = drawn(&view, 160, 40);
        // Each of two tasks has trained thirty, and one is requested of every trial.
        assert!(screen.contains("; 60 of 99 minibatches requested so far"), "{screen}");
    }

    #[test]
    fn no_terminal_is_too_small_and_no_run_too_young() {
        let dir = run();
        let mut view = View::new(dir.path()).unwrap();
        for (width, height) in [(80, 24), (40, 10), (20, 4), (3, 2), (1, 1), (300, 90)] {
            drawn(&view, width, height);
        }
        view.refresh().unwrap();
        for (width, height) in [(80, 24), (40, 10), (20, 4), (3, 2), (1, 1), (300, 90)] {
            drawn(&view, width, height);
        }
        assert!(drawn(&view, 80, 12).contains("fast"), "the table has priority:\n{}", drawn(&view, 80, 12));
        fs::remove_file(dir.path().join(SPEC)).unwrap();
        let error = View::new(dir.path()).err().unwrap().to_string();
        assert!(error.contains("is not a run directory"), "{error}");
    }
}
