//! What tests ask for again and again: options, tokens, single attempts, and what callbacks were told.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use syncguard::{
    Acquired, Backoff, CancelToken, ErrorCode, Heartbeat, Jitter, LockError, LockOptions, PgLockClient,
    ReleaseErrorContext, ReleaseSource,
};

use super::place::TTL;
use super::wait::{LIMIT, wait_until};

/// What a bounded call may take beyond its bound before it counts as hanging.
pub const MARGIN: Duration = Duration::from_secs(2);

/// The two forms of an operation: one message, or two where the call has a token to look at in between.
pub const FORMS: [bool; 2] = [false, true];

pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// With a token that can fire an operation takes two messages.
pub fn token(two_messages: bool) -> CancelToken {
    if two_messages { CancelToken::new() } else { CancelToken::never() }
}

/// For every other number a client whose operations take two messages.
pub fn either_form(client: &PgLockClient, n: usize) -> PgLockClient {
    if n.is_multiple_of(2) { client.clone() } else { client.cancellable(&CancelToken::new()) }
}

#[track_caller]
pub fn acquire(client: &PgLockClient, key: &str) -> Option<Acquired> {
    client.acquire(key, TTL).expect("the server answers").acquired()
}

#[track_caller]
pub fn granted(client: &PgLockClient, key: &str) -> Acquired {
    acquire(client, key).expect("the key is free")
}

/// The error of a call that waits in vain with little time, as the server has told it. On a busy machine the
/// answer may come later than the client waits for it: then nobody knows what has become of the call.
#[track_caller]
pub fn told_in_time<T: Debug>(
    client: &PgLockClient,
    told: impl Fn(&LockError) -> bool,
    mut call: impl FnMut() -> Result<T, LockError>,
) -> LockError {
    for _ in 0..5 {
        // To connect would take of its time.
        wait_until(LIMIT, "the client is connected", || client.is_locked("warm").is_ok());
        let error = call().expect_err("it waits in vain");
        if told(&error) {
            return error;
        }
        assert_eq!(error.code(), ErrorCode::NetworkTimeout, "{error:?}");
    }
    panic!("five times in a row the answer came too late")
}

/// Longer than any test that is well. A call that nothing ends fails then, instead of hanging.
const AT_MOST: Duration = LIMIT.saturating_mul(5);

/// Waits and asks often.
pub fn asking_often() -> LockOptions {
    LockOptions::new().timeout(AT_MOST).backoff(Backoff::Fixed).retry_delay(ms(5))
}

/// Waits, and asks again so rarely that only a call of this process can help.
pub fn asking_hourly() -> LockOptions {
    LockOptions::new()
        .timeout(AT_MOST)
        .backoff(Backoff::Fixed)
        .jitter(Jitter::None)
        .retry_delay(Duration::from_secs(3600))
        .wake_ups(false)
}

/// Renewed so often that a test need not wait for it.
pub fn renewing_often() -> LockOptions {
    LockOptions::new().heartbeat(Heartbeat::Every(ms(40)))
}

/// Collects what a callback was told.
pub struct Recorder<T>(Arc<Mutex<Vec<T>>>);

/// What a client's callback for failed releases is told: code, source, key, lock id.
pub type ReleaseFailure = (ErrorCode, ReleaseSource, String, String);

impl<T> Default for Recorder<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone + Send + 'static> Recorder<T> {
    pub fn callback(&self) -> impl Fn(T) + Send + Sync + use<T> + 'static {
        let list = Arc::clone(&self.0);
        move |item| list.lock().unwrap_or_else(PoisonError::into_inner).push(item)
    }

    pub fn list(&self) -> Vec<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The callback for failed releases that notes them here.
pub fn on_release_error(
    recorder: &Recorder<ReleaseFailure>,
) -> impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + use<> + 'static {
    let note = recorder.callback();
    move |error, context| {
        note((error.code(), context.source, context.key.clone(), context.lock_id.clone()));
    }
}
