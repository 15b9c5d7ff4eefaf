//! A TCP forwarder that can be led to another server, and can forget its connections as a firewall
//! does: their bytes go nowhere, and nobody is told.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::thread;

pub struct Forwarder {
    port: u16,
    inner: Arc<Inner>,
}

struct Inner {
    server: AtomicU16,
    /// Connections with a lower number are forgotten.
    known_from: AtomicU64,
    next: AtomicU64,
    closing: AtomicBool,
}

impl Forwarder {
    pub fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let inner = Arc::new(Inner {
            server: AtomicU16::new(server),
            known_from: AtomicU64::new(0),
            next: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&inner);
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.closing.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(client) = client {
                    accepting.forward(client);
                }
            }
        });
        Self { port, inner }
    }

    /// The same address of a database, through the forwarder.
    pub fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Has new connections lead to this port; the old ones stay where they are.
    pub fn lead_to(&self, server: u16) {
        self.inner.server.store(server, Ordering::SeqCst);
    }

    /// Forgets all connections that are open; new ones work.
    pub fn forget(&self) {
        self.inner.known_from.store(self.inner.next.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// How many connections were opened.
    pub fn opened(&self) -> u64 {
        self.inner.next.load(Ordering::SeqCst)
    }
}

impl Inner {
    fn forward(self: &Arc<Self>, client: TcpStream) {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let Ok(server) = TcpStream::connect(("127.0.0.1", self.server.load(Ordering::SeqCst))) else {
            return;
        };
        let (Ok(from), Ok(to)) = (client.try_clone(), server.try_clone()) else { return };
        for (mut from, mut to) in [(from, to), (server, client)] {
            let inner = Arc::clone(self);
            thread::spawn(move || {
                let mut bytes = [0; 8192];
                while let Ok(n @ 1..) = from.read(&mut bytes) {
                    let known = number >= inner.known_from.load(Ordering::SeqCst);
                    if known && to.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.inner.closing.store(true, Ordering::SeqCst);
        // Ends the wait for a connection.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}
