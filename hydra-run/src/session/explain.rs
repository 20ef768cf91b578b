//! The prediction of a run as text: traffic, time, the bottleneck, and which changes would help.

use super::prediction::{Binding, DevicePrediction, Prediction, TaskPrediction};
use crate::terminal::Table;
use hydra_core::{Bandwidth, ByteSize};
use hydra_engine::LinkRate;

/// The legend of the traffic table.
const LEGEND: &str = "\
up: host to device; down: device to host
promoted: parameters of a shard, once for the forward and once for the backward pass of each microbatch group, unless cached
activations: at shard boundaries; down after the forward pass, up for the backward pass and for a shard that runs later
gradients: of parameters, down to the host's optimizer, after each microbatch
";

/// Returns the prediction as text. Every line ends with a newline.
pub(crate) fn render(prediction: &Prediction) -> String {
    let Prediction { makespan_s, simulated_one_in, link_up, link_down, .. } = prediction;
    let mut text = "\nprediction:\n".to_owned();
    text.extend(prediction.devices.iter().map(|device| device_line(device, prediction.parameter_bytes)));
    text.push_str(&format!("traffic and time per minibatch:\n{}{LEGEND}", minibatches(&prediction.tasks)));
    let part = match simulated_one_in {
        1 => String::new(),
        by => format!(", extrapolated from 1 in {by} minibatches"),
    };
    let [promoted, saved] = [ByteSize(prediction.promoted_bytes).to_string(), percent(prediction.saved)];
    text.push_str(&format!(
        "predicted time: {}{part}, simulated with the timings of the pilot pass; {promoted} promoted, {saved} of \
        promotions avoided by the parameter cache\n",
        duration(*makespan_s)
    ));
    let computes: Vec<String> = prediction
        .devices
        .iter()
        .map(|device| format!("{} {}", device.name, percent(device.computes)))
        .collect();
    let (up, down) = (percent(*link_up), percent(*link_down));
    text.push_str(&format!(
        "utilization: {}, host-to-device link {up}, device-to-host link {down}\n",
        computes.join(", ")
    ));
    text.push_str(&format!("{}\n", binding(prediction)));
    text.push_str(&relief(prediction));
    text + &format!("not included in the predicted time: {}\n", prediction.excluded.join("; "))
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

/// Returns the line on a device: its peak memory, its link and its parameter cache.
fn device_line(device: &DevicePrediction, parameter_bytes: u64) -> String {
    let link = match device.link {
        LinkRate::ZeroCopy => "reads parameters in place from host memory (zero-copy)".to_owned(),
        LinkRate::Simulated { bytes_per_s } => format!("simulated link of {}", Bandwidth(bytes_per_s)),
        LinkRate::Measured { bytes_per_s, bytes } => {
            let (rate, bytes) = (Bandwidth(bytes_per_s), ByteSize(bytes));
            format!("link of {rate}, measured with uploads of {bytes}")
        }
    };
    let cache = match device.copies_bytes {
        Some(bytes) => format!(
            "; parameter cache of {}, for {} of all models",
            ByteSize(bytes),
            ByteSize(parameter_bytes)
        ),
        None => "; no parameter cache".to_owned(),
    };
    let cache = if device.link == LinkRate::ZeroCopy { String::new() } else { cache };
    format!("device {}: peak memory {}; {link}{cache}\n", device.name, ByteSize(device.peak_bytes))
}

fn minibatches(tasks: &[TaskPrediction]) -> String {
    let disk = tasks.iter().any(|task| task.moved.disk_parameter_bytes > 0);
    let on_disk = [">read from disk", ">written to disk"].into_iter().filter(|_| disk);
    let columns =
        ["<task", ">parameters", ">promoted", ">activations up", ">activations down", ">gradients down"];
    let mut table = Table::new(columns.into_iter().chain(on_disk).chain([">time", ">task done after"]));
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
            // Promotions read the share of the parameters that is on disk.
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
        Binding::Compute => format!("compute (devices compute {busy} of the time)"),
        Binding::LinkUp => format!("the host-to-device link (busy with parameters {busy} of the time)"),
        Binding::LinkDown => {
            format!("the device-to-host link (busy with activations and gradients {busy} of the time)")
        }
        Binding::Waits => format!(
            "latency (no device or link is busy more than {busy} of the time: shard tasks wait for their own promotions and \
            gradients)"
        ),
    };
    format!("bottleneck: {binds}")
}

fn relief(prediction: &Prediction) -> String {
    let helps =
        prediction.relief.iter().map(|relief| format!("{}: {:.2}x speedup", relief.change, relief.factor));
    let helps: Vec<String> = helps.collect();
    match helps.is_empty() {
        true => "no simulated change gives a 1.1x speedup: device memory, device count, device speed, link speed, microbatches\n"
            .to_owned(),
        false => format!("simulated changes that help: {}\n", helps.join("; ")),
    }
}

/// Formats seconds with a suitable unit.
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
