//! The engine over the memory backend.

mod endings;
mod guards;
mod in_order;
mod looks;
mod panics;
mod recorder;
mod registry;
mod schedules;
mod sets;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use super::{
    Backoff, ClientSettings, Heartbeat, Jitter, LockClient, LockOptions, OnReleaseError, ReleaseErrorContext,
    ReleaseSource,
};
use crate::backend::{ExtendResult, Heard, LostReason, ReleaseResult};
use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError};
use crate::sync::Mutex;
use recorder::{Recorder, Script, eventually};

fn s(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn client(backend: &Arc<Recorder>) -> LockClient {
    LockClient::new(Arc::clone(backend))
}

/// What the handler for failed releases was called with.
type Reports = Arc<Mutex<Vec<(ErrorCode, ReleaseErrorContext)>>>;

fn recorder() -> (Reports, impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + 'static) {
    let reports = Reports::default();
    let record = Arc::clone(&reports);
    (reports, move |error: &LockError, context: &ReleaseErrorContext| {
        record.lock().push((error.code(), context.clone()));
    })
}

/// A client, and a call's options with a handler of their own if `own`: who is told of a failed release
/// then, and who is not.
fn reporting_to(own: bool, backend: &Arc<Recorder>) -> (LockClient, LockOptions, Reports, Reports) {
    let (client, clients) = reporting_client(backend);
    let (calls, handler) = recorder();
    if own {
        (client, LockOptions::new().on_release_error(handler), calls, clients)
    } else {
        (client, LockOptions::new(), clients, calls)
    }
}

fn reporting_client(backend: &Arc<Recorder>) -> (LockClient, Reports) {
    let (reports, handler) = recorder();
    let settings = ClientSettings {
        owner: None,
        on_release_error: Some(OnReleaseError::new(Arc::new(handler))),
        ..ClientSettings::default()
    };
    (LockClient::with_settings(Arc::clone(backend) as _, settings), reports)
}
