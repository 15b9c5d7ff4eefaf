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

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::frames::{query, read_frame, rewritten, sqlstate, text_at};

/// Follows the name of a statement that the driver has bound, where rules see it.
pub const BOUND: &str = " by Bind";

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
type Rewrite = Arc<dyn Fn(&str) -> String + Send + Sync>;

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

/// What is to be done with the answer that is under way.
enum Answer {
    Pass,
    /// Collected up to its end.
    CutAt(usize, Vec<u8>),
    Swallow,
    Delay(Duration),
    /// That to what was said first is nobody's business.
    PassSecond,
    /// Of a zombie: nobody listens.
    Unheard,
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
        thread::spawn(move || accept(&listener, &there));
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

    /// From now on the server gets these texts in the place of those that clients send, of queries and of
    /// what they prepare. Rules see the texts as they were sent.
    pub fn rewrite(&self, rewrite: impl Fn(&str) -> String + Send + Sync + 'static) {
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
    fn rewrite(&self, frames: Vec<u8>) -> Vec<u8> {
        let Some(rewrite) = self.state().rewrite.clone() else { return frames };
        let (frames, changed) = rewritten(&frames, &*rewrite);
        self.state().rewritten += u64::from(changed);
        frames
    }
}

fn accept(listener: &TcpListener, inner: &Arc<Inner>) {
    for client in listener.incoming() {
        if inner.state().closing {
            return;
        }
        let Ok(client) = client else { continue };
        let mut state = inner.state();
        let refuses = state.refusals > 0 && !state.counts.is_empty();
        state.refusals -= u32::from(refuses);
        if refuses || state.network == Network::Refusing {
            continue;
        }
        drop(state);
        let there = Arc::clone(inner);
        thread::spawn(move || {
            there.wait_for_network();
            let Ok(server) = TcpStream::connect(("127.0.0.1", there.server)) else { return };
            let _ = serve(&there, client, &server);
        });
    }
}

fn serve(inner: &Arc<Inner>, client: TcpStream, server: &TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let id = {
        let mut state = inner.state();
        state.next += 1;
        let id = state.next;
        state.open.insert(id, (client.try_clone()?, server.try_clone()?));
        id
    };
    let answer = Arc::new(Mutex::new(Answer::Pass));
    let idle = Arc::new(AtomicBool::new(false));
    let back = {
        let (inner, answer, idle) = (Arc::clone(inner), Arc::clone(&answer), Arc::clone(&idle));
        let (client, server) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ = pump_answers(&inner, server, &client, (&answer, &idle));
            let _ = client.shutdown(Shutdown::Both);
        })
    };
    let outcome = pump_queries(inner, client, server, (&answer, &idle));
    // A late query's connection lives on until it is answered.
    if !matches!(*answer.lock().unwrap_or_else(PoisonError::into_inner), Answer::Unheard) {
        let _ = server.shutdown(Shutdown::Write);
    }
    let _ = back.join();
    inner.state().open.remove(&id);
    outcome
}

/// From client to server; returns when the client has gone and all it said is delivered.
fn pump_queries(
    inner: &Inner,
    mut client: TcpStream,
    mut server: &TcpStream,
    (answer, idle): (&Mutex<Answer>, &AtomicBool),
) -> io::Result<()> {
    let set = |what| *answer.lock().unwrap_or_else(PoisonError::into_inner) = what;
    let cut = |client: &TcpStream| {
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
        Ok(())
    };
    let mut queries = Queries::default();
    loop {
        let (frame, sql) = queries.read(&mut client)?;
        inner.wait_for_network();
        let Some(sql) = sql else {
            server.write_all(&frame)?;
            continue;
        };
        let action = inner.decide(&sql);
        let frame = inner.rewrite(frame);
        match action {
            Action::CutQueryAt(n) => {
                server.write_all(frame.get(..n.min(frame.len() - 1)).unwrap_or_default())?;
                return cut(&client);
            }
            Action::CutNow => {
                set(Answer::Swallow);
                server.write_all(&frame)?;
                return cut(&client);
            }
            Action::CutAnswerAt(n) => set(Answer::CutAt(n, Vec::new())),
            Action::SwallowAnswer => set(Answer::Swallow),
            Action::DelayQuery(delay) => {
                set(Answer::Pass);
                thread::sleep(delay);
            }
            Action::DiscardAll | Action::SayFirst(_) if idle.load(Ordering::SeqCst) => {
                set(Answer::PassSecond);
                let said = if let Action::SayFirst(said) = action { said } else { "DISCARD ALL" };
                server.write_all(&query(said))?;
            }
            // Within a transaction there is nothing to discard.
            Action::Pass | Action::DiscardAll | Action::SayFirst(_) => set(Answer::Pass),
            Action::DelayAnswer(delay) => set(Answer::Delay(delay)),
            Action::Zombie(_) | Action::Twice(_) => {
                let delay = match action {
                    Action::Twice(delay) => {
                        set(Answer::Swallow);
                        server.write_all(&frame)?;
                        Some(delay)
                    }
                    Action::Zombie(delay) => {
                        set(Answer::Unheard);
                        delay
                    }
                    _ => None,
                };
                let _ = client.shutdown(Shutdown::Both);
                inner.wait_for_gate(delay);
                set(Answer::Unheard);
                if server.write_all(&frame).is_err() {
                    inner.state().zombies_over += 1;
                }
                return Ok(());
            }
        }
        server.write_all(&frame)?;
    }
}

/// From server to client; returns when the server has gone.
fn pump_answers(
    inner: &Inner,
    mut server: TcpStream,
    mut client: &TcpStream,
    (answer, idle): (&Mutex<Answer>, &AtomicBool),
) -> io::Result<()> {
    loop {
        let frame = read_frame(&mut server, false);
        inner.wait_for_network();
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*answer, Answer::Unheard)
            && let Ok(frame) = &frame
            && let Some(state) = sqlstate(frame)
        {
            inner.state().late_error = Some(state);
        }
        if matches!(*answer, Answer::Unheard) && frame.as_ref().is_ok_and(|frame| frame[0] == b'Z')
            || frame.is_err()
        {
            if matches!(*answer, Answer::Unheard) {
                inner.state().zombies_over += 1;
            }
            return frame.map(drop);
        }
        let frame = frame?;
        if frame.first() == Some(&b'Z') {
            idle.store(frame.get(5) == Some(&b'I'), Ordering::SeqCst);
        }
        match &mut *answer {
            Answer::Pass => client.write_all(&frame)?,
            Answer::CutAt(n, so_far) => {
                so_far.extend_from_slice(&frame);
                if frame.first() == Some(&b'Z') {
                    client.write_all(so_far.get(..*n).unwrap_or(so_far))?;
                    inner.state().last_answer = so_far.len();
                    let _ = client.shutdown(Shutdown::Both);
                    return server.shutdown(Shutdown::Both);
                }
            }
            Answer::PassSecond if frame.first() == Some(&b'Z') => *answer = Answer::Pass,
            Answer::Swallow | Answer::Unheard | Answer::PassSecond => {}
            Answer::Delay(delay) => {
                let delay = *delay;
                *answer = Answer::Pass;
                drop(answer);
                thread::sleep(delay);
                client.write_all(&frame)?;
            }
        }
    }
}

/// What one connection has prepared, to know what it calls.
#[derive(Default)]
struct Queries {
    started: bool,
    /// The texts of simple queries that prepare statements.
    prepared: String,
    /// By the driver's names of statements: ours, or the text.
    parsed: HashMap<String, String>,
}

impl Queries {
    /// The next message, or all of them up to a `Sync`, and what it says if it is a query.
    fn read(&mut self, client: &mut TcpStream) -> io::Result<(Vec<u8>, Option<String>)> {
        let mut all = read_frame(client, !self.started)?;
        if !std::mem::replace(&mut self.started, true) {
            return Ok((all, None));
        }
        if all.first() == Some(&b'Q') {
            let sql = text_at(&all, 5);
            if sql.contains("PREPARE ") {
                self.prepared.push_str(&sql);
            }
            return Ok((all, Some(sql)));
        }
        let mut says = None;
        let mut frame = all.clone();
        loop {
            let name = text_at(&frame, 5);
            match frame.first() {
                Some(b'P') => {
                    let sql = text_at(&frame, 6 + name.len());
                    says = Some(format!("Parse {sql}"));
                    let called = self.name_of(&sql).unwrap_or(sql);
                    self.parsed.insert(name, called);
                }
                Some(b'B') => {
                    let statement = text_at(&frame, 6 + name.len());
                    let called = self.parsed.get(&statement).map_or("", String::as_str);
                    says = Some(format!("EXECUTE {called}{BOUND}"));
                }
                Some(b'D' | b'E' | b'C') => {}
                _ => return Ok((all, says)),
            }
            frame = read_frame(client, false)?;
            all.extend_from_slice(&frame);
        }
    }

    /// The name under which this text was prepared by a simple query.
    fn name_of(&self, sql: &str) -> Option<String> {
        let (before, _) = self.prepared.split_once(&format!(" AS {sql}"))?;
        let (_, name) = before.rsplit_once("PREPARE ")?;
        Some(name.split('(').next().unwrap_or(name).to_owned())
    }
}
