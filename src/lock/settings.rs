//! The settings of a client over any backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::LockError;
use crate::lock::report::{OnReleaseError, ReleaseErrorContext};

/// The settings of a [`LockClient`](crate::LockClient).
#[derive(Clone)]
pub struct ClientSettings {
    /// How long a guard's `Drop`, and the end of `with_lock`, may take to release. Default 5 s.
    pub dispose_timeout: Duration,
    pub(crate) on_release_error: Option<OnReleaseError>,
    pub(crate) owner: Option<Arc<str>>,
}

impl ClientSettings {
    /// Who this client is, for people who ask who has a key: see
    /// [`PgLockClientBuilder::owner`](crate::PgLockClientBuilder::owner). At most 1 KiB; one that is longer is
    /// `InvalidArgument` with every lock.
    #[must_use]
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into().into());
        self
    }

    /// Called when an automatic release failed, unless the lock's own options say otherwise. Without
    /// it such failures are logged as warnings in debug builds and with `SYNCGUARD_DEBUG=true`.
    ///
    /// It lives as long as the client: a callback that holds a client keeps it, and its threads, forever.
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
        Self { dispose_timeout: Duration::from_secs(5), on_release_error: None, owner: None }
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientSettings")
            .field("dispose_timeout", &self.dispose_timeout)
            .field("on_release_error", &self.on_release_error.is_some())
            .field("owner", &self.owner.is_some())
            .finish()
    }
}
