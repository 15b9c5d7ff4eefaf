//! When something counts as growing: where the middle of its last quarter lies above that of its second one by more than
//! the series is allowed. The first quarter is the beginning: pools fill, every key gets its counter, the server is
//! restarted.

use std::fmt;

use crate::samples::{SERIES, Samples, Series};

#[derive(Debug)]
pub struct Verdict {
    series: &'static Series,
    early: f64,
    late: f64,
    pub grows: bool,
}

pub fn all(samples: &Samples) -> Vec<Verdict> {
    let end = samples.seconds();
    let judged = SERIES.iter().enumerate().map(|(n, series)| {
        let values = samples.of(n);
        let between = |from: f64, to: f64| {
            median(
                values.iter().filter(|(at, _)| (from..=to).contains(at)).map(|(_, value)| *value).collect(),
            )
        };
        let (early, late) = (between(end * 0.25, end * 0.5), between(end * 0.75, end));
        Verdict { series, early, late, grows: late > early * (1.0 + series.part) + series.more }
    });
    judged.collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Verdict {
    pub fn row(&self) -> String {
        let Self { series, early, late, grows } = self;
        let verdict = if *grows { "**grows**" } else { "flat" };
        let verdict = if series.part > 1e9 { "" } else { verdict };
        format!(
            "| {} | {early:.1} {unit} | {late:.1} {unit} | {verdict} |\n",
            series.name,
            unit = series.unit
        )
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { series, early, late, grows } = self;
        write!(
            f,
            "{}: {early:.1} -> {late:.1} {}{}",
            series.name,
            series.unit,
            if *grows { " GROWS" } else { "" }
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// An hour in which the first series is this, and the others stand still; the names of those that grow.
    fn growing(first: impl Fn(u64) -> f64) -> Vec<&'static str> {
        let mut samples = Samples::default();
        for n in 0..360 {
            let mut values = [Some(10.0); SERIES.len()];
            values[0] = Some(first(n));
            // The server was away for a moment.
            if n == 40 {
                values = [None; SERIES.len()];
            }
            samples.push(Duration::from_secs(n * 10), values);
        }
        all(&samples).iter().filter(|verdict| verdict.grows).map(|verdict| verdict.series.name).collect()
    }

    #[test]
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn a_slow_leak_is_found_and_a_beginning_and_noise_are_none() {
        assert_eq!(growing(|n| 40.0 + n as f64 / 60.0), [SERIES[0].name], "1 KiB per activity or so");
        assert_eq!(growing(|n| if n < 60 { n as f64 } else { 60.0 }), [""; 0]);
        assert_eq!(growing(|n| 40.0 + (n % 7) as f64), [""; 0]);
        assert_eq!(growing(|n| if n % 50 == 0 { 400.0 } else { 40.0 }), [""; 0]);
    }
}
