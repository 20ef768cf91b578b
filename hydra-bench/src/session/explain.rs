//! The prediction of a run as text: what stays, what moves and why, how long it takes, what binds and what would help.

use super::prediction::{Binding, DevicePrediction, Prediction, TaskPrediction};
use crate::terminal::Table;
use hydra_core::{Bandwidth, ByteSize};
use hydra_engine::LinkRate;

/// What a column of the table holds, and why it moves.
const WHY: &str = "\
promoted: parameters, up the link, for each shard once forward and once backward in each visit, where no copy has stayed
activations: between shards; down when they are made, up again for the backward and for what does not follow at once
gradients: of parameters, down to the host's optimizer, of each microbatch
";

/// The prediction as text; every line is ended.
pub(crate) fn render(prediction: &Prediction) -> String {
    let Prediction { makespan_s, simulated_one_in, link_up, link_down, .. } = prediction;
    let mut text: String =
        prediction.devices.iter().map(|device| stays(device, prediction.parameter_bytes)).collect();
    text.push_str(&format!("every minibatch:\n{}{WHY}", minibatches(&prediction.tasks)));
    let part = match simulated_one_in {
        1 => String::new(),
        by => format!(", one in {by} minibatches of which was simulated"),
    };
    let [promoted, saved] = [ByteSize(prediction.promoted_bytes).to_string(), percent(prediction.saved)];
    text.push_str(&format!(
        "predicted time: {}{part}, by simulating the run with the times of the pilot pass; {promoted} promoted, {saved} of \
         promotions saved by copies\n",
        duration(*makespan_s)
    ));
    let computes: Vec<String> = prediction
        .devices
        .iter()
        .map(|device| format!("{} {}", device.name, percent(device.computes)))
        .collect();
    let (up, down) = (percent(*link_up), percent(*link_down));
    text.push_str(&format!("busy: {}, links up {up}, links down {down}\n", computes.join(", ")));
    text.push_str(&format!("{}\n", binding(prediction)));
    text.push_str(&relief(prediction));
    text + &format!("not in the predicted time: {}\n", prediction.skipped.join("; "))
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

/// The link of a device, and what stays on it.
fn stays(device: &DevicePrediction, parameter_bytes: u64) -> String {
    let link = match device.link {
        LinkRate::ZeroCopy => "reads parameters where the host has them".to_owned(),
        LinkRate::Simulated { bytes_per_s } => format!("a simulated link of {}", Bandwidth(bytes_per_s)),
        LinkRate::Measured { bytes_per_s, bytes } => {
            let (rate, bytes) = (Bandwidth(bytes_per_s), ByteSize(bytes));
            format!("a link of {rate}, as uploads of {bytes} measured it")
        }
    };
    let copies = match device.copies_bytes {
        Some(bytes) => format!(
            "; copies of parameters have {} beside what computes, all models have {}",
            ByteSize(bytes),
            ByteSize(parameter_bytes)
        ),
        None => "; no copies of parameters stay".to_owned(),
    };
    let copies = if device.link == LinkRate::ZeroCopy { String::new() } else { copies };
    format!(
        "{}: at most {} of its memory are taken; {link}{copies}\n",
        device.name,
        ByteSize(device.peak_bytes)
    )
}

fn minibatches(tasks: &[TaskPrediction]) -> String {
    let disk = tasks.iter().any(|task| task.moved.disk_parameter_bytes > 0);
    let on_disk = [">read from the disk", ">written there"].into_iter().filter(|_| disk);
    let columns =
        ["<task", ">parameters", ">promoted", ">activations up", ">activations down", ">gradients down"];
    let mut table = Table::new(columns.into_iter().chain(on_disk).chain([">takes", ">done after"]));
    for TaskPrediction { moved, minibatch_s, promoted_bytes, finished_s } in tasks {
        let size = |bytes: u64| ByteSize(bytes).to_string();
        let moves = [
            moved.parameter_bytes,
            *promoted_bytes,
            moved.boundary_up_bytes,
            moved.boundary_down_bytes,
            moved.gradient_down_bytes,
        ];
        let mut row = vec![moved.name.clone()];
        row.extend(moves.map(size));
        if disk {
            // Promotions read the part of the parameters that is on the disk.
            let share = moved.disk_parameter_bytes as f64 / moved.parameter_bytes.max(1) as f64;
            let read = (share * *promoted_bytes as f64) as u64 + moved.disk_step_bytes;
            row.extend([size(read), size(moved.disk_step_bytes)]);
        }
        row.extend([duration(*minibatch_s), duration(*finished_s)]);
        table.row(row);
    }
    table.render()
}

fn binding(prediction: &Prediction) -> String {
    let busy = percent(prediction.busy);
    let binds = match prediction.binding {
        Binding::Compute => format!("compute: devices compute {busy} of the time"),
        Binding::LinkUp => format!("the link up: parameters move to devices {busy} of the time"),
        Binding::LinkDown => {
            format!("the link down: activations and gradients move to the host {busy} of the time")
        }
        Binding::Waits => format!(
            "waiting: nothing is busy more than {busy} of the time, because shard tasks wait for their own promotions and \
             gradients"
        ),
    };
    format!("what binds is {binds}")
}

fn relief(prediction: &Prediction) -> String {
    let helps = prediction
        .relief
        .iter()
        .map(|relief| format!("{}: {:.2} times as fast", relief.change, relief.factor));
    let helps: Vec<String> = helps.collect();
    match helps.is_empty() {
        true => "nothing that was tried helps by a tenth: device memory, devices, their compute and links, microbatches\n"
            .to_owned(),
        false => format!("what would help: {}\n", helps.join("; ")),
    }
}

/// Seconds as people say them.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", 1e3 * s),
        s if s < 59.95 => format!("{s:.1} s"),
        s if s.round() < 3600.0 => {
            format!("{:.0} min {:02.0} s", (s.round() / 60.0).floor(), s.round() % 60.0)
        }
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        let shown = ["500.0 ms", "3.2 s", "1 min 00 s", "10 min 05 s", "59 min 59 s", "1.0 h", "10.0 h"];
        assert_eq!([0.5, 3.25, 59.97, 605.4, 3599.0, 3599.7, 36_000.0].map(duration), shown);
    }
}
