//! Signals as events: in a wait they end it, later they are the program's.

use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use syncguard::CancelToken;

use crate::supervise::Event;

/// Sends each signal as an event, and fires the token.
pub(crate) fn listen(tell: Sender<Event>, waiting: CancelToken) -> io::Result<()> {
    let ignored = ignored();
    // What the caller has switched off stays off, as `nohup` wants it, and a shell for its background jobs.
    let heard = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGTSTP].into_iter();
    let heard = heard.filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = Signals::new(heard)?;
    thread::Builder::new().name("syncguard-signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if signal == SIGTSTP {
                continue; // Ctrl-Z must not stop the renewals while the program goes on.
            }
            let _ = tell.send(Event::Signal(signal));
            waiting.cancel();
        }
    })?;
    Ok(())
}

/// The signals that this process was started with as ignored, a bit each. Where the system does not say: none.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
