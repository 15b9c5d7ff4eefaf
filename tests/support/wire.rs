//! What may stand between a client and its server: a line that goes silent, somebody who speaks in
//! another's name, a transaction pooler. Plain text, simple queries, trust authentication only.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::frames::refuse_tls;

/// Forwards every connection to a server of its own, until told otherwise.
#[derive(Debug)]
pub struct Wire {
    port: u16,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Nothing is forwarded any more, and nothing is closed.
    silent: AtomicBool,
    /// How many bytes of clients have vanished.
    lost: AtomicUsize,
    /// How many answers to keep from the client.
    swallow: AtomicUsize,
    servers: Mutex<Vec<TcpStream>>,
}

impl Wire {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
        let own = listener.local_addr().expect("it is bound").port();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (Ok(client2), Ok(server2), Ok(kept)) =
                    (client.try_clone(), server.try_clone(), server.try_clone())
                else {
                    continue;
                };
                shared.servers.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
                let (to_server, to_client) = (Arc::clone(&shared), Arc::clone(&shared));
                thread::spawn(move || to_server.pump(client, server));
                thread::spawn(move || to_client.pump_answers(server2, client2));
            }
        });
        Self { port: own, state }
    }

    pub fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// From now on bytes vanish in both directions.
    pub fn go_silent(&self) {
        self.state.silent.store(true, Ordering::SeqCst);
    }

    /// How many bytes of clients have vanished since.
    pub fn lost(&self) -> usize {
        self.state.lost.load(Ordering::SeqCst)
    }

    /// Ends the servers' side, as a failover does, while the clients hear nothing of it.
    pub fn end_sessions_silently(&self) {
        self.go_silent();
        for server in self.state.servers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    /// Has every session carry out a query of somebody else's; the client does not see the answer.
    pub fn speak(&self, sql: &str) {
        for mut server in self.state.servers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            self.state.swallow.fetch_add(1, Ordering::SeqCst);
            if server.write_all(&query(sql)).is_err() {
                // That session has ended.
                self.state.swallow.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

impl State {
    fn pump(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 4096];
        if !self.silent.load(Ordering::SeqCst) && refuse_tls(&mut from).is_err() {
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            if self.silent.load(Ordering::SeqCst) {
                self.lost.fetch_add(n, Ordering::SeqCst);
            } else if to.write_all(&bytes[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    fn pump_answers(&self, mut from: TcpStream, mut to: TcpStream) {
        while let Ok(message) = read_message(&mut from) {
            if self.silent.load(Ordering::SeqCst) {
                continue;
            }
            if self.swallow.load(Ordering::SeqCst) > 0 {
                if message[0] == b'Z' {
                    self.swallow.fetch_sub(1, Ordering::SeqCst);
                }
            } else if to.write_all(&message).is_err() {
                break;
            }
        }
        if !self.silent.load(Ordering::SeqCst) {
            let _ = to.shutdown(Shutdown::Both);
        }
    }
}

/// All clients share one server session, a transaction each: what a pooler in transaction mode does
/// when its other connections are busy.
pub fn transaction_pooler(port: u16) -> String {
    let mut server = TcpStream::connect(("127.0.0.1", port)).expect("the server listens");
    server.write_all(&startup()).expect("the server listens");
    let greeting = read_answer(&mut server).expect("the server answers");
    let server = Arc::new(Mutex::new(server));
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let own = listener.local_addr().expect("it is bound").port();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let (server, greeting) = (Arc::clone(&server), greeting.clone());
            thread::spawn(move || -> io::Result<()> {
                refuse_tls(&mut client)?;
                let mut length = [0; 4];
                client.read_exact(&mut length)?;
                io::copy(
                    &mut Read::by_ref(&mut client).take(u64::from(u32::from_be_bytes(length)) - 4),
                    &mut io::sink(),
                )?;
                client.write_all(&greeting)?;
                loop {
                    let message = read_message(&mut client)?;
                    if message[0] == b'X' {
                        return Ok(());
                    }
                    let mut server = server.lock().unwrap_or_else(PoisonError::into_inner);
                    server.write_all(&message)?;
                    client.write_all(&read_answer(&mut server)?)?;
                }
            });
        }
    });
    format!("postgresql://postgres@127.0.0.1:{own}/postgres")
}

fn query(sql: &str) -> Vec<u8> {
    let length = u32::try_from(sql.len() + 5).expect("a short query");
    [b"Q", &length.to_be_bytes()[..], sql.as_bytes(), b"\0"].concat()
}

fn startup() -> Vec<u8> {
    let rest = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
    let length = u32::try_from(rest.len() + 4).expect("a short message");
    [&length.to_be_bytes()[..], rest].concat()
}

/// Messages up to "ready for query".
fn read_answer(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    loop {
        let message = read_message(stream)?;
        answer.extend_from_slice(&message);
        if message[0] == b'Z' {
            return Ok(answer);
        }
    }
}

fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut message = vec![0; 5];
    stream.read_exact(&mut message)?;
    let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]);
    let rest = usize::try_from(length).expect("a usize has 32 bits") - 4;
    message.resize(5 + rest, 0);
    stream.read_exact(&mut message[5..])?;
    Ok(message)
}
