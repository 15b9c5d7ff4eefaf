//! `elect`: a program that runs while this process leads.

use std::ops::ControlFlow::{Break, Continue};

use crate::args::{At, Elect};
use crate::choices::{OnLost, Wait};
use crate::failure::{Ended, Failure, say};
use crate::output::printable;
use crate::progress::{Progress, Subject};
use crate::run::Work;
use crate::supervise::{Ending, code_of, code_of_signal};

pub(crate) fn elect(at: &At, elect: &Elect) -> Ended {
    if elect.on_lost == OnLost::Ignore {
        return Err(Failure::Usage(
            "--on-lost ignore would leave two leaders: choose term, kill or a command".to_owned(),
        ));
    }
    let work = Work::begin(at, &elect.program, &elect.on_lost)?;
    let key = printable(&elect.key);
    let campaign = || {
        let subject =
            Subject { key: elect.key.clone(), permits: None, wait: Wait::Forever, doing: "not leading" };
        Progress::start(&work.client, subject)
    };
    let mut line = campaign();
    let led = work.client.elect(&elect.key, &elect.order.of(work.options()), |term| {
        line = None;
        let told = [("SYNCGUARD_KEY", elect.key.clone()), ("SYNCGUARD_FENCE", term.number().to_string())];
        say(&format!("{key}: leading, term {}", term.number().get()));
        let ended = work.supervisor(&told).run(term);
        match ended {
            Ok(Ending::Lost) => {
                say(&format!("{key}: not leading any more, campaigning again"));
                line = campaign();
                Continue(())
            }
            Ok(Ending::Exited(status)) => Break(Ok(code_of(status))),
            Ok(Ending::NotStarted(signal)) => Break(Ok(code_of_signal(signal))),
            Err(failure) => Break(Err(failure)),
        }
    });
    drop(line);
    let code = match led {
        Ok(ended) => ended,
        Err(error) => match work.interrupted(&error) {
            Some(code) => Ok(code),
            None => Err(Failure::At(key, error)),
        },
    };
    work.close();
    code
}
