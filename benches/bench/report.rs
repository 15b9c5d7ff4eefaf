//! Rows of the table: figure, median, spread, goal, and whether it was reached.

use std::cell::RefCell;
use std::time::Duration;

/// Which side of a goal is the good one.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
    /// Shown for information.
    None,
}

/// Prints rows as they come, and remembers how many goals were missed.
#[derive(Default)]
pub(crate) struct Report {
    missed: RefCell<Vec<String>>,
}

impl Report {
    pub(crate) fn head() {
        println!("| figure | median | spread | goal | | absolute, on this machine |");
        println!("| --- | ---: | --- | --- | --- | --- |");
    }

    pub(crate) fn row(&self, figure: &str, values: Vec<f64>, goal: Goal, note: &str) {
        let (low, median, high) = spread(values);
        let (sign, verdict) = match goal {
            Goal::AtLeast(goal) => (format!("≥ {goal}"), median >= goal),
            Goal::AtMost(goal) => (format!("≤ {goal}"), median <= goal),
            Goal::None => (String::new(), true),
        };
        let word = match (goal, verdict) {
            (Goal::None, _) => "",
            (_, true) => "reached",
            (_, false) => "missed",
        };
        if !verdict {
            self.missed.borrow_mut().push(figure.to_owned());
        }
        println!("| {figure} | {} | {}–{} | {sign} | {word} | {note} |", show(median), show(low), show(high));
    }

    /// One value, counted and not timed.
    pub(crate) fn count(&self, figure: &str, value: f64, goal: Goal, note: &str) {
        self.row(figure, vec![value], goal, note);
    }

    pub(crate) fn foot(&self) {
        let missed = self.missed.borrow();
        if missed.is_empty() {
            println!("\nEvery goal was reached.");
        } else {
            println!("\nMissed: {}.", missed.join("; "));
        }
    }
}

/// Lowest, median and highest of the middle nine tenths.
pub(crate) fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let cut = values.len() / 20;
    let kept = &values[cut..values.len() - cut];
    (kept[0], kept[kept.len() / 2], kept[kept.len() - 1])
}

pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = ((sorted.len() - 1) as f64 * q).round() as usize;
    sorted[place]
}

pub(crate) fn micros(each: Duration, of: u64) -> String {
    format!("{:.0} µs", each.as_secs_f64() * 1e6 / of as f64)
}

fn show(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e9 {
        format!("{value}")
    } else if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.3}")
    }
}
