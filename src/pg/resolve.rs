//! Names to addresses, within a caller's own time.
//!
//! The system's resolver has no limit that a caller could set: a silent name server holds a call
//! for half a minute. So each name is looked up by a thread of its own, which all callers that
//! need the name join, and which none of them waits for longer than it has time.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::error::{ErrorCode, LockError, Result};
use crate::sync::{Mutex, MutexGuard};
use crate::threads::spawn;

type Lookup = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

/// Cheap to clone; clones share what is under way.
#[derive(Clone)]
pub(crate) struct Resolver {
    lookup: Arc<Lookup>,
    names: Arc<Mutex<HashMap<String, Name>>>,
}

#[derive(Default)]
struct Name {
    /// When the lookup that is under way began.
    since: Option<Instant>,
    waiting: Vec<Sender<Event>>,
    /// The last answer that named an address.
    last: Vec<IpAddr>,
}

#[derive(Clone)]
enum Event {
    Answer(Result<Vec<IpAddr>, (io::ErrorKind, Arc<str>)>),
    Cancelled,
}

impl Resolver {
    /// Asks the system.
    pub(crate) fn system() -> Self {
        Self::new(|name| {
            let mut found = Vec::new();
            for address in (name, 0).to_socket_addrs()? {
                if !found.contains(&address.ip()) {
                    found.push(address.ip());
                }
            }
            Ok(found)
        })
    }

    pub(crate) fn new(lookup: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static) -> Self {
        Self { lookup: Arc::new(lookup), names: Arc::default() }
    }

    /// The addresses of a name, at least one.
    ///
    /// Without an answer the last one serves: a name server that is away must not end locks that
    /// the server itself could still serve. It is waited for half of the limit then, counted from
    /// the beginning of the lookup, so that only the first of many calls waits.
    pub(crate) fn resolve(&self, name: &str, limit: Duration, cancel: &CancelToken) -> Result<Vec<IpAddr>> {
        let (sender, receiver) = channel();
        let (start, wait, last) = {
            let mut names = self.names();
            let entry = names.entry(name.to_owned()).or_default();
            let start = entry.since.is_none();
            let since = *entry.since.get_or_insert_with(Instant::now);
            let wait =
                if entry.last.is_empty() { limit } else { (limit / 2).saturating_sub(since.elapsed()) };
            if !wait.is_zero() {
                entry.waiting.push(sender.clone());
            }
            (start, wait, entry.last.clone())
        };
        if start {
            self.start(name);
        }
        let watch = cancel.subscribe(move || drop(sender.send(Event::Cancelled)));
        let event = receiver.recv_timeout(wait);
        drop(watch);
        cancel.check()?;
        match event {
            Ok(Event::Answer(Ok(found))) if !found.is_empty() => Ok(found),
            _ if !last.is_empty() => {
                log::debug!("no answer for the name of a host: its last addresses are used");
                Ok(last)
            }
            Ok(Event::Answer(Ok(_))) => Err(unknown_name(io::Error::other("the name has no address"))),
            Ok(Event::Answer(Err((kind, text)))) => Err(unknown_name(io::Error::new(kind, &*text))),
            Ok(Event::Cancelled) | Err(_) => Err(LockError::new(ErrorCode::NetworkTimeout).with_message(
                "no answer came from the name server in time: check it, or give the host's address in hostaddr",
            )),
        }
    }

    /// Looks a name up on a thread of its own. Without a thread the lookup ends at once, in vain.
    fn start(&self, name: &str) {
        let lookup = Arc::clone(&self.lookup);
        let mut under_way = UnderWay { resolver: self.clone(), name: name.to_owned(), answer: None };
        let run = move || under_way.answer = Some(lookup(&under_way.name));
        if let Err(error) = spawn("syncguard-resolve", run) {
            log::debug!("no thread to look up the name of a host: {error}");
        }
    }

    fn names(&self) -> MutexGuard<'_, HashMap<String, Name>> {
        self.names.lock()
    }
}

/// A lookup under way: however it ends, those who wait are told, and the next one may begin.
struct UnderWay {
    resolver: Resolver,
    name: String,
    answer: Option<io::Result<Vec<IpAddr>>>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or_else(|| Err(io::Error::other("the lookup ended early")));
        let answer = answer.map_err(|error| (error.kind(), error.to_string().into()));
        let mut names = self.resolver.names();
        let Some(entry) = names.get_mut(&self.name) else { return };
        entry.since = None;
        if let Ok(found) = &answer
            && !found.is_empty()
        {
            entry.last.clone_from(found);
        }
        let waiting = std::mem::take(&mut entry.waiting);
        drop(names);
        for sender in waiting {
            // Whoever is out of time has gone.
            let _ = sender.send(Event::Answer(answer.clone()));
        }
    }
}

fn unknown_name(cause: io::Error) -> LockError {
    LockError::new(ErrorCode::ServiceUnavailable)
        .with_message(
            "the name of the host cannot be resolved: check it in the connection settings, and the name server",
        )
        .with_source(cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(20);

    fn ip(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    /// A name server that answers with what is sent; silent until then.
    fn scripted() -> (Resolver, SyncSender<io::Result<Vec<IpAddr>>>, Arc<AtomicUsize>) {
        let (answer, answers) = sync_channel(16);
        let answers: Mutex<Receiver<io::Result<Vec<IpAddr>>>> = Mutex::new(answers);
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let resolver = Resolver::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            answers.lock().recv().unwrap_or_else(|_| Err(io::Error::other("over")))
        });
        (resolver, answer, asked)
    }

    #[test]
    fn a_silent_name_server_ends_a_call_at_its_deadline() {
        let (resolver, _answer, _) = scripted();
        let error = resolver.resolve("a", SHORT, &CancelToken::never()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NetworkTimeout);
        assert!(error.to_string().contains("name server"), "{error}");
    }

    #[test]
    fn a_fired_token_ends_the_wait_for_a_name() {
        let (resolver, _answer, asked) = scripted();
        let token = CancelToken::new();
        std::thread::scope(|scope| {
            let call = scope.spawn(|| resolver.resolve("a", LONG, &token));
            while asked.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            token.cancel();
            assert_eq!(call.join().unwrap().unwrap_err().code(), ErrorCode::Aborted);
        });
    }

    #[test]
    fn callers_of_one_name_share_one_look_up() {
        let (resolver, answer, asked) = scripted();
        std::thread::scope(|scope| {
            let calls: Vec<_> =
                (0..8).map(|_| scope.spawn(|| resolver.resolve("a", LONG, &CancelToken::never()))).collect();
            while resolver.names().get("a").is_none_or(|name| name.waiting.len() < 8) {
                std::thread::yield_now();
            }
            answer.send(Ok(vec![ip(1)])).unwrap();
            for call in calls {
                assert_eq!(call.join().unwrap().unwrap(), [ip(1)]);
            }
        });
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn the_last_answer_serves_while_the_name_server_is_away() {
        let (resolver, answer, asked) = scripted();
        let resolve = |limit| resolver.resolve("a", limit, &CancelToken::never());
        answer.send(Ok(vec![ip(1)])).unwrap();
        assert_eq!(resolve(LONG).unwrap(), [ip(1)]);
        answer.send(Err(io::Error::other("refused"))).unwrap();
        assert_eq!(resolve(LONG).unwrap(), [ip(1)], "an error");
        answer.send(Ok(Vec::new())).unwrap();
        assert_eq!(resolve(LONG).unwrap(), [ip(1)], "no address");
        assert_eq!(resolve(SHORT).unwrap(), [ip(1)], "silence");
        assert_eq!(resolve(SHORT).unwrap(), [ip(1)], "the same silence");
        answer.send(Ok(vec![ip(2)])).unwrap();
        while resolver.names().get("a").is_some_and(|name| name.since.is_some()) {
            std::thread::yield_now();
        }
        answer.send(Ok(vec![ip(3)])).unwrap();
        assert_eq!(resolve(LONG).unwrap(), [ip(3)], "it is back");
        assert_eq!(asked.load(Ordering::SeqCst), 5, "the silence was one lookup");
    }

    #[test]
    fn a_name_that_nobody_knows_says_so() {
        let (resolver, answer, _) = scripted();
        answer.send(Err(io::Error::other("no such name"))).unwrap();
        let error = resolver.resolve("a", LONG, &CancelToken::never()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ServiceUnavailable);
        assert!(error.chain().to_string().contains("no such name"), "{}", error.chain());
    }

    #[test]
    fn a_look_up_that_panics_is_over() {
        let resolver = Resolver::new(|_| panic!("on purpose"));
        for _ in 0..2 {
            assert!(resolver.resolve("a", LONG, &CancelToken::never()).is_err());
        }
    }
}
