//! The points of a loss curve that are sent: all losses of a short run, a selection of a long one.

use serde_json::{Value, json};

/// The maximum number of points of all tasks together; the minimum and maximum of one task.
const ALL: usize = 200_000;
const EACH: (usize, usize) = (200, 4000);

/// Returns the maximum number of points of one task's curve, given the number of tasks.
pub(super) fn points_each(tasks: usize) -> usize {
    (ALL / tasks.max(1)).clamp(EACH.0, EACH.1)
}

/// Returns the minibatches and losses to draw, at most `most`. If there are more, each window of `each` minibatches keeps its
/// smallest and largest loss, so no spike is lost; the means of the windows are returned as well.
pub(super) fn drawn(losses: impl ExactSizeIterator<Item = Option<f64>>, most: usize) -> Value {
    let total = losses.len();
    let each = if total <= most { 1 } else { (2 * total).div_ceil(most) };
    let mut curve = DashboardCurve { each, ..DashboardCurve::default() };
    losses.enumerate().for_each(|(step, loss)| curve.push(step, loss));
    curve.end();
    let DashboardCurve { steps, losses, middles, means, .. } = curve;
    json!({ "of": total, "each": each, "steps": steps, "losses": losses, "middles": middles, "means": means })
}

#[derive(Default)]
struct DashboardCurve {
    each: usize,
    steps: Vec<usize>,
    losses: Vec<Option<f64>>,
    middles: Vec<f64>,
    means: Vec<f64>,
    window: Vec<(usize, Option<f64>)>,
}

impl DashboardCurve {
    fn push(&mut self, step: usize, loss: Option<f64>) {
        self.window.push((step, loss));
        if self.window.len() == self.each {
            self.end();
        }
    }

    /// Ends a window.
    fn end(&mut self) {
        let window = std::mem::take(&mut self.window);
        let Some((first, last)) = window.first().zip(window.last()) else { return };
        if self.each == 1 {
            return self.keep(*first);
        }
        let numbers = || window.iter().filter_map(|(step, loss)| Some((*step, (*loss)?)));
        let least = numbers().min_by(|a, b| a.1.total_cmp(&b.1));
        let most = numbers().max_by(|a, b| a.1.total_cmp(&b.1));
        let Some((a, b)) = least.zip(most) else { return self.keep(*first) };
        let (a, b) = if a.0 <= b.0 { (a, b) } else { (b, a) };
        self.keep((a.0, Some(a.1)));
        if a.0 != b.0 {
            self.keep((b.0, Some(b.1)));
        }
        let count = numbers().count() as f64;
        self.middles.push((first.0 + last.0) as f64 / 2.0);
        self.means.push(numbers().map(|(_, loss)| loss).sum::<f64>() / count);
    }

    fn keep(&mut self, (step, loss): (usize, Option<f64>)) {
        self.steps.push(step);
        self.losses.push(loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_curve_is_whole() {
        let drawn = drawn([Some(3.0), None, Some(1.0)].into_iter(), 10);
        assert_eq!(
            drawn,
            json!({
                "of": 3, "each": 1, "steps": [0, 1, 2], "losses": [3.0, null, 1.0], "middles": [], "means": [],
            })
        );
    }

    #[test]
    fn a_long_curve_keeps_its_spikes_and_says_what_it_left_out() {
        let mut losses: Vec<Option<f64>> = (0..10_000).map(|step| Some(1.0 / f64::from(step + 1))).collect();
        losses[6543] = Some(99.0);
        losses[7000] = None;
        let drawn = drawn(losses.iter().copied(), 1000);
        let steps: Vec<usize> = serde_json::from_value(drawn["steps"].clone()).unwrap();
        let kept: Vec<Option<f64>> = serde_json::from_value(drawn["losses"].clone()).unwrap();
        assert!(steps.len() <= 1000 && steps.is_sorted() && drawn["each"] == 20 && drawn["of"] == 10_000);
        assert!(steps.iter().zip(&kept).all(|(step, loss)| losses[*step] == *loss), "all are real");
        assert!(kept.contains(&Some(99.0)));
        assert_eq!(drawn["means"].as_array().unwrap().len(), 500);
    }

    #[test]
    fn many_tasks_share_the_points() {
        assert_eq!([1, 100, 1000, 100_000].map(points_each), [4000, 2000, 200, 200]);
    }
}
