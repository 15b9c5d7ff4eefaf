//! A TCP proxy in front of a server that knows where the protocol's messages begin and end.
//!
//! For every query that a client sends, a rule says what becomes of it and of its answer:
//! cut before, cut within, cut after any number of bytes of the answer, delayed, swallowed, or held
//! back and delivered after the client has gone (a *zombie*), or delivered twice. Beside that the whole network can be
//! mute (bytes wait, and arrive when it is open again) or refuse connections.
//!
//! A query is a simple one (`Q`), or all messages of the extended protocol up to its `Sync`. A rule
//! sees the latter as `EXECUTE name`, too, if its text was once prepared under that name, with
//! [`BOUND`] behind it.
//!
//! The protocol's framing: <https://www.postgresql.org/docs/current/protocol-overview.html>.

mod queries;
mod traffic;

use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use self::queries::Queries;
use super::frames::rewritten;
use super::sql::Said;

pub use queries::BOUND;

/// What becomes of one query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Pass,
    /// This many bytes of the query reach the server, then both sides are cut. Zero: none does.
    CutQueryAt(usize),
    /// The query reaches the server, and both sides are cut at once.
    CutNow,
    /// The server answers in full, the client gets this many bytes of it, then both sides are cut.
    CutAnswerAt(usize),
    /// The server answers, the client hears nothing, and the connection stays open.
    SwallowAnswer,
    DelayQuery(Duration),
    DelayAnswer(Duration),
    /// What a pooler does between two clients: everything of the session is forgotten before the query.
    /// Within a transaction: as `Pass`.
    DiscardAll,
    /// The same with another statement.
    SayFirst(&'static str),
    /// The client is cut, and the query arrives after this time; `None`: when the gate opens.
    Zombie(Option<Duration>),
    /// The client is cut, the query reaches the server at once, and again after this time.
    Twice(Duration),
}

impl Action {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::CutQueryAt(_) => "connection cut within the query",
            Self::CutNow => "connection cut behind the query",
            Self::CutAnswerAt(_) => "connection cut within the answer",
            Self::SwallowAnswer => "answer swallowed",
            Self::DelayQuery(_) => "query delayed",
            Self::DelayAnswer(_) => "answer delayed",
            Self::DiscardAll => "DISCARD ALL before the query",
            Self::SayFirst(_) => "another statement before the query",
            Self::Zombie(_) => "query arrives after its client has gone",
            Self::Twice(_) => "query arrives again after its client has gone",
        }
    }
}

/// The state of the whole network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    Open,
    /// Bytes and connection attempts wait.
    Mute,
    /// New connections are closed at once.
    Refusing,
}

type Rule = Box<dyn FnMut(&str) -> Action + Send>;
type Rewrite = Arc<dyn Fn(Said<'_>) -> String + Send + Sync>;

/// Dropping it cuts everything.
pub struct Proxy {
    port: u16,
    inner: Arc<Inner>,
}

struct Inner {
    server: u16,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    rule: Option<Rule>,
    rewrite: Option<Rewrite>,
    rewritten: u64,
    network: Network,
    gate_open: bool,
    /// So many new connections are still to be refused, once a query was held back.
    refusals: u32,
    closing: bool,
    next: u64,
    open: HashMap<u64, (TcpStream, TcpStream)>,
    counts: BTreeMap<&'static str, u64>,
    last_answer: usize,
    zombies_over: u64,
    late_error: Option<String>,
    bound: u64,
    queries: u64,
}

impl Proxy {
    /// In front of the server on this local port.
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let state = State {
            rule: None,
            rewrite: None,
            rewritten: 0,
            network: Network::Open,
            gate_open: false,
            refusals: 0,
            closing: false,
            next: 0,
            open: HashMap::new(),
            counts: BTreeMap::new(),
            last_answer: 0,
            zombies_over: 0,
            late_error: None,
            bound: 0,
            queries: 0,
        };
        let inner = Arc::new(Inner { server, state: Mutex::new(state), changed: Condvar::new() });
        let there = Arc::clone(&inner);
        thread::spawn(move || traffic::accept(&listener, &there));
        Self { port, inner }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// A URL of the server, led through here.
    pub fn url(&self, server_url: &str) -> String {
        server_url.replace(&format!("127.0.0.1:{}", self.inner.server), &format!("127.0.0.1:{}", self.port))
    }

    /// From now on this decides about each query, by its text.
    pub fn on_query(&self, rule: impl FnMut(&str) -> Action + Send + 'static) {
        self.inner.state().rule = Some(Box::new(rule));
    }

    /// From now on the server gets these texts in the place of those of the statements that clients send, and of
    /// what they prepare. Rules see the texts as they were sent.
    pub fn rewrite(&self, rewrite: impl Fn(Said<'_>) -> String + Send + Sync + 'static) {
        self.inner.state().rewrite = Some(Arc::new(rewrite));
    }

    /// How many queries have been changed by that.
    pub fn rewritten(&self) -> u64 {
        self.inner.state().rewritten
    }

    /// Applies the action to the next query that contains `text`, once.
    pub fn once(&self, text: &str, action: Action) {
        let (text, mut left) = (text.to_owned(), true);
        self.on_query(move |sql| {
            if left && sql.contains(&text) {
                left = false;
                action
            } else {
                Action::Pass
            }
        });
    }

    pub fn pass_all(&self) {
        self.inner.state().rule = None;
    }

    pub fn network(&self, network: Network) {
        self.inner.state().network = network;
        self.inner.changed.notify_all();
    }

    /// Refuses so many connections that are made after the next action was carried out.
    pub fn refuse_after_it(&self, connections: u32) {
        self.inner.state().refusals = connections;
    }

    /// Whether it has come to that.
    pub fn has_refused(&self) -> bool {
        self.inner.state().refusals == 0
    }

    /// Lets the zombies walk.
    pub fn open_gate(&self) {
        self.inner.state().gate_open = true;
        self.inner.changed.notify_all();
    }

    /// How many zombies have been answered, or met a closed connection.
    pub fn zombies_over(&self) -> u64 {
        self.inner.state().zombies_over
    }

    /// The SQLSTATE with which the server has refused a zombie.
    pub fn late_error(&self) -> Option<String> {
        self.inner.state().late_error.clone()
    }

    /// Cuts all open connections.
    pub fn cut_all(&self) {
        for (client, server) in self.inner.state().open.values() {
            let _ = client.shutdown(Shutdown::Both);
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    /// The size of the last answer that was cut.
    pub fn last_answer(&self) -> usize {
        self.inner.state().last_answer
    }

    /// How often each action was carried out.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.inner.state().counts.clone()
    }

    /// How many queries have come.
    pub fn queries(&self) -> u64 {
        self.inner.state().queries
    }

    /// How many calls came by Bind.
    pub fn bound(&self) -> u64 {
        self.inner.state().bound
    }

    pub fn count(&self) -> u64 {
        self.inner.state().counts.values().sum()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.inner.state().closing = true;
        self.inner.changed.notify_all();
        self.cut_all();
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the network is mute.
    fn wait_for_network(&self) {
        let mut state = self.state();
        while state.network == Network::Mute && !state.closing {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wait_for_gate(&self, limit: Option<Duration>) {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut state = self.state();
        while !state.gate_open && !state.closing {
            let left =
                end.map_or(Duration::from_secs(3600), |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn decide(&self, sql: &str) -> Action {
        let mut state = self.state();
        state.queries += 1;
        state.bound += u64::from(sql.ends_with(BOUND));
        let action = state.rule.as_mut().map_or(Action::Pass, |rule| rule(sql));
        if action != Action::Pass {
            *state.counts.entry(action.name()).or_default() += 1;
        }
        action
    }

    /// The messages as the server is to get them.
    fn rewrite(&self, frames: Vec<u8>, queries: &Queries) -> Vec<u8> {
        let Some(rewrite) = self.state().rewrite.clone() else { return frames };
        let (frames, changed) = rewritten(&frames, &|text| queries.name_of(text), &*rewrite);
        self.state().rewritten += u64::from(changed);
        frames
    }
}
