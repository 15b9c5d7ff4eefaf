//! Two things measured in turn, block by block, so that the machine's moods hit both.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// What the blocks of a pair took.
pub(crate) struct Pair {
    pub(crate) first: Vec<Duration>,
    pub(crate) second: Vec<Duration>,
}

impl Pair {
    /// Runs both `blocks` times, first one way round, then the other. The first round only warms up.
    pub(crate) fn run(
        blocks: usize,
        mut first: impl FnMut() -> Duration,
        mut second: impl FnMut() -> Duration,
    ) -> Self {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for block in 0..=blocks {
            let (x, y) = if block % 2 == 0 {
                let x = first();
                (x, second())
            } else {
                let y = second();
                (first(), y)
            };
            if block > 0 {
                a.push(x);
                b.push(y);
            }
        }
        Self { first: a, second: b }
    }

    /// How fast the second is, as a part of the first.
    pub(crate) fn speed(&self) -> Vec<f64> {
        self.first.iter().zip(&self.second).map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()).collect()
    }

    /// What the second costs, as a multiple of the first.
    pub(crate) fn cost(&self) -> Vec<f64> {
        self.first.iter().zip(&self.second).map(|(a, b)| b.as_secs_f64() / a.as_secs_f64()).collect()
    }

    /// The medians per cycle, to show beside the ratio.
    pub(crate) fn note(&self, cycles: usize, names: [&str; 2]) -> String {
        let [a, b] = [&self.first, &self.second].map(|all| {
            let mut all: Vec<_> = all.clone();
            all.sort();
            all[all.len() / 2].as_secs_f64() * 1e6 / cycles as f64
        });
        format!("{} {b:.0} µs, {} {a:.0} µs", names[1], names[0])
    }
}

pub(crate) fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The time from the moment when all threads are ready until the last is done.
pub(crate) fn together<S: Send>(each: &mut [S], work: impl Fn(usize, &mut S, &Barrier) + Sync) -> Duration {
    let go = Barrier::new(each.len() + 1);
    thread::scope(|scope| {
        let all: Vec<_> = each
            .iter_mut()
            .enumerate()
            .map(|(thread, state)| {
                let (go, work) = (&go, &work);
                scope.spawn(move || work(thread, state, go))
            })
            .collect();
        go.wait();
        let start = Instant::now();
        for thread in all {
            thread.join().unwrap();
        }
        start.elapsed()
    })
}
