//! Threads: ours, which have a name and survive user code, and those of others on which the driver
//! must not be used.
//!
//! The driver blocks on a runtime of its own. It panics where another async runtime runs on the
//! thread, and where the thread's thread-locals are gone: in the destructor of a thread-local, in an
//! `atexit` handler, in the destructor of a C++ static or of a `pthread_key`. A panic there aborts the
//! process, so that has to be known before the driver is called.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::Builder;
#[cfg(not(test))]
pub(crate) use std::thread::JoinHandle;

use tokio::runtime::Handle;

use crate::sync::Mutex;
#[cfg(test)]
pub(crate) use crate::sync::simulated::JoinHandle;

/// Starts a thread with a name. A panic in it ends there.
pub(crate) fn spawn(name: &str, call: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let builder = Builder::new().name(name.to_owned());
    #[cfg(test)]
    return crate::sync::simulated::spawn(builder, move || ignore_panic(call));
    #[cfg(not(test))]
    builder.spawn(move || ignore_panic(call))
}

/// Runs user code, or a backend's. `None` if it panicked. (The panic hook has already told it.)
pub(crate) fn catch_panic<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(value) => Some(value),
        Err(payload) => {
            // A payload's own Drop may panic as well; leaking it is the one thing that cannot.
            std::mem::forget(payload);
            None
        }
    }
}

/// The same where nothing comes back.
pub(crate) fn ignore_panic(call: impl FnOnce()) {
    let _ = catch_panic(call);
}

/// Whether the driver must not be used, or dropped, on this thread.
///
/// Also true on Tokio's blocking threads, where it would be legal: a detour only costs a thread.
pub(crate) fn driver_unusable() -> bool {
    in_runtime() || thread_locals_gone()
}

/// Whether this thread is inside an async runtime.
pub(crate) fn in_runtime() -> bool {
    Handle::try_current().is_ok()
}

/// Whether this thread's thread-locals are gone: those that the driver needs.
pub(crate) fn thread_locals_gone() -> bool {
    Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
}

/// Drops a value that holds the driver: here where that is legal, else on a thread of its own. Where
/// the system gives no thread the value is leaked, with its socket.
pub(crate) fn drop_where_allowed<T: Send + 'static>(value: T) {
    if driver_unusable() {
        run_detached(value, drop);
    } else {
        ignore_panic(move || drop(value));
    }
}

/// Leaves something to a thread of its own, without waiting for it. Leaks the value where the system
/// gives no thread.
pub(crate) fn run_detached<T: Send + 'static>(value: T, call: impl FnOnce(T) + Send + 'static) {
    let slot = Arc::new(Mutex::new(Some(value)));
    let there = Arc::clone(&slot);
    let spawned = spawn("syncguard-close", move || {
        if let Some(value) = there.lock().take() {
            call(value);
        }
    });
    if spawned.is_err() {
        std::mem::forget(slot.lock().take());
    }
}

/// Runs something on a thread of its own and waits for it, for a caller whose thread-locals are gone.
/// `None` if it panicked, or if the system gave no thread.
pub(crate) fn run_on_own_thread<R: Send>(call: impl FnOnce() -> R + Send) -> Option<R> {
    std::thread::scope(|scope| {
        let thread = Builder::new().name("syncguard-close".to_owned());
        // Joined here: the scope's own wait would need the thread-locals.
        thread.spawn_scoped(scope, || catch_panic(call)).ok()?.join().ok().flatten()
    })
}

/// A value of the caller's, mostly a callback with what it captured. Its drop is user code as well,
/// and its panic ends here.
pub(crate) struct UserValue<T>(Option<T>);

impl<T> UserValue<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<T: Clone> Clone for UserValue<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Drop for UserValue<T> {
    fn drop(&mut self) {
        ignore_panic(|| drop(self.0.take()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    /// Calls on the thread that it is dropped on.
    struct AtTheEnd(Option<Box<dyn FnOnce() + Send>>);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            if let Some(call) = self.0.take() {
                call();
            }
        }
    }

    std::thread_local! {
        static KEPT: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
    }

    /// Runs this when the thread-locals of a thread that has used the driver are gone.
    fn at_a_threads_end(call: impl FnOnce() + Send + 'static) {
        thread::spawn(|| {
            KEPT.with(|kept| *kept.borrow_mut() = Some(AtTheEnd(Some(Box::new(call)))));
            // Later than the slot, so that it goes before it.
            assert!(!thread_locals_gone());
        })
        .join()
        .unwrap();
    }

    fn tell(to: &Sender<bool>, what: bool) {
        to.send(what).unwrap();
    }

    #[test]
    fn a_thread_whose_locals_are_gone_is_told_from_others() {
        let (to, seen) = channel();
        assert!(!driver_unusable());
        at_a_threads_end(move || tell(&to, thread_locals_gone() && driver_unusable() && !in_runtime()));
        assert!(seen.recv().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(runtime.block_on(async { driver_unusable() && !thread_locals_gone() }));
    }

    #[test]
    fn what_a_thread_without_locals_cannot_do_is_done_elsewhere() {
        struct Probe(Sender<bool>);
        impl Drop for Probe {
            fn drop(&mut self) {
                let _ = self.0.send(!driver_unusable());
            }
        }
        let (to, seen) = channel();
        at_a_threads_end(move || {
            assert_eq!(run_on_own_thread(|| !thread_locals_gone()), Some(true));
            assert_eq!(run_on_own_thread(|| -> u8 { panic!("elsewhere") }), None);
            drop_where_allowed(Probe(to));
        });
        assert!(seen.recv().unwrap(), "dropped where that is legal");
    }

    #[test]
    fn a_users_value_may_panic_when_it_is_dropped() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in a drop");
            }
        }
        drop(UserValue::new(Bomb));
        drop_where_allowed(Bomb);
    }
}
