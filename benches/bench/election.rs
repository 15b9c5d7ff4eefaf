//! A leader that steps down, and the next one.

use std::ops::ControlFlow::{Break, Continue};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use syncguard::{CancelToken, LockOptions, PgLockClient};

use crate::Stage;
use crate::report::Goal::{AtMost, None as NoGoal};
use crate::report::quantile;

/// Long enough that the others listen, as candidates do nearly always.
const TERM: Duration = Duration::from_millis(60);

struct Led {
    candidate: usize,
    from: Instant,
    until: Instant,
}

/// Three candidates, each with a client of its own: to the server three processes. They do not tell each other
/// of a release, and have one clock.
pub(crate) fn run(stage: &Stage) {
    let url = stage.schema.socket_url();
    let wanted = if stage.quick { 40 } else { 300 };
    let end = CancelToken::new();
    let terms = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for candidate in 0..3 {
            let (url, end, terms) = (&url, &end, &terms);
            scope.spawn(move || {
                let client = PgLockClient::connect(url).unwrap();
                let options = LockOptions::new().cancel(end);
                let ended = client.elect("leader", &options, |_term| {
                    let from = Instant::now();
                    thread::sleep(TERM);
                    let mut all = terms.lock().unwrap();
                    all.push(Led { candidate, from, until: Instant::now() });
                    if all.len() > wanted {
                        end.cancel();
                        return Break(());
                    }
                    Continue(())
                });
                assert!(ended.is_ok() || end.is_cancelled(), "{ended:?}");
            });
        }
    });
    let terms = terms.into_inner().unwrap();
    let pairs = terms.windows(2).filter(|pair| pair[0].candidate != pair[1].candidate);
    let times: Vec<f64> =
        pairs.map(|pair| pair[1].from.duration_since(pair[0].until).as_secs_f64() * 1e3).collect();
    let (p99, longest) = (quantile(&times, 0.99), quantile(&times, 1.0));
    let note = format!(
        "{} of {} terms; from the end of one to the next leader's first step",
        times.len(),
        terms.len()
    );
    stage.report.row("handover of a leader that steps down, p50 in ms", times, AtMost(3.0), &note);
    let report = &stage.report;
    report.count("… p99 in ms", p99, AtMost(15.0), "");
    report.count("… longest, in ms", longest, NoGoal, "");
}
