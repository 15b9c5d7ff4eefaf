//! A line between client and server that takes its time, and counts the client's messages.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Every connection is forwarded, each direction `delay` late.
pub(crate) struct Line {
    port: u16,
    server: u16,
    messages: Arc<AtomicU64>,
}

impl Line {
    pub(crate) fn start(server: u16, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let messages = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&messages);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let to = TcpStream::connect(("127.0.0.1", server)).unwrap();
                for stream in [&client, &to] {
                    stream.set_nodelay(true).unwrap();
                }
                let (up, down) = (client.try_clone().unwrap(), to.try_clone().unwrap());
                forward(up, to, delay, Some(Arc::clone(&counter)));
                forward(down, client, delay, None);
            }
        });
        Self { port, server, messages }
    }

    /// The address of a database, by way of this line.
    pub(crate) fn url(&self, url: &str) -> String {
        url.replace(&format!(":{}", self.server), &format!(":{}", self.port))
            .replace("localhost", "127.0.0.1")
    }

    /// How many times a client has sent something and then waited.
    pub(crate) fn messages(&self) -> u64 {
        self.messages.load(Ordering::SeqCst)
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, delay: Duration, counter: Option<Arc<AtomicU64>>) {
    let (send, receive) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if let Some(counter) = &counter {
                counter.fetch_add(1, Ordering::SeqCst);
            }
            if send.send((Instant::now() + delay, buffer[..n].to_vec())).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        while let Ok((due, bytes)) = receive.recv() {
            // Sleeping is too coarse for half a millisecond.
            while Instant::now() < due {
                thread::yield_now();
            }
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}
