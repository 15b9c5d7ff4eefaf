//! What the driver needs of the system, found out before it is called.
//!
//! To connect, and to send a cancel request, the driver builds an async runtime and unwraps the
//! result, and it resolves names on a thread that it expects to get: without a free descriptor or
//! thread it panics, which ends a program that is built with `panic = "abort"`.

use std::io;

use tokio::runtime::{Builder, Runtime};

use crate::error::{ErrorCode, LockError, Result};
use crate::threads::spawn;

const NO_THREAD: &str = "the system gives no thread for a connection: raise the limit of threads (ulimit -u, the container's pids limit), or run fewer";

/// Builds what the driver would build, twice, and starts a thread. Something else may still take
/// what was found in the moment before the driver does.
pub(crate) fn check() -> Result<()> {
    let build = || Builder::new_current_thread().enable_all().build();
    let both: io::Result<[Runtime; 2]> = build().and_then(|first| Ok([first, build()?]));
    drop(both.map_err(|cause| {
        exhausted(
            "no file descriptor is free for a connection: raise the limit (ulimit -n), or find what leaves files and sockets open",
            cause,
        )
    })?);
    check_thread()
}

/// Starts a thread that does nothing, and waits for its end: the next one may need its place.
pub(crate) fn check_thread() -> Result<()> {
    let probe = spawn("syncguard-probe", || {}).map_err(|cause| exhausted(NO_THREAD, cause))?;
    drop(probe.join());
    Ok(())
}

fn exhausted(what: &'static str, cause: io::Error) -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable).with_message(what).with_source(cause)
}
