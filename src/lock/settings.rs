//! What a client over any backend is built with.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::LockError;
use crate::lock::report::{OnReleaseError, ReleaseErrorContext};

/// What a [`LockClient`](crate::LockClient) is built with.
#[derive(Clone)]
pub struct ClientSettings {
    /// How long a guard's `Drop`, and the end of `with_lock`, may take to release. Default 5 s.
    pub dispose_timeout: Duration,
    pub(crate) on_release_error: Option<OnReleaseError>,
}

impl ClientSettings {
    /// Called when an automatic release failed, unless the lock's own options say otherwise. Without
    /// it such failures are logged as warnings in debug builds and with `SYNCGUARD_DEBUG=true`.
    ///
    /// It lives as long as the client: one that holds a client keeps it, and its threads, forever.
    #[must_use]
    pub fn on_release_error(
        mut self,
        callback: impl Fn(&LockError, &ReleaseErrorContext) + Send + Sync + 'static,
    ) -> Self {
        self.on_release_error = Some(OnReleaseError::new(Arc::new(callback)));
        self
    }
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self { dispose_timeout: Duration::from_secs(5), on_release_error: None }
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientSettings")
            .field("dispose_timeout", &self.dispose_timeout)
            .field("on_release_error", &self.on_release_error.is_some())
            .finish()
    }
}
