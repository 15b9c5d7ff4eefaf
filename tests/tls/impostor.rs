//! Somebody between client and server, who speaks TLS to both and has a certificate of his own.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use openssl::ssl::{SslAcceptor, SslConnector, SslMethod, SslStream, SslVerifyMode};

use crate::support::tls::{Request, Signed};
use crate::world::{PASSWORD, World, connect, refused};

const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

/// Passes on what both say, in the clear for himself. Returns his port.
fn stand_between(world: &World, shown: &Signed) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls()).unwrap();
    acceptor.set_private_key(&shown.key).unwrap();
    acceptor.set_certificate(&shown.certificate).unwrap();
    let (acceptor, server) = (acceptor.build(), world.server.port());
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let acceptor = acceptor.clone();
            thread::spawn(move || between(client, &acceptor, server));
        }
    });
    port
}

fn between(mut client: TcpStream, acceptor: &SslAcceptor, server: u16) -> Option<()> {
    client.read_exact(&mut [0; 8]).ok()?;
    client.write_all(b"S").ok()?;
    let mut client = acceptor.accept(client).ok()?;
    let mut server = TcpStream::connect(("127.0.0.1", server)).ok()?;
    server.write_all(&SSL_REQUEST).ok()?;
    server.read_exact(&mut [0]).ok()?;
    let mut connector = SslConnector::builder(SslMethod::tls()).ok()?;
    connector.set_verify(SslVerifyMode::NONE);
    let mut server = connector.build().connect("db.example", server).ok()?;
    for stream in [client.get_ref(), server.get_ref()] {
        stream.set_read_timeout(Some(Duration::from_millis(2))).ok()?;
    }
    loop {
        pass(&mut client, &mut server)?;
        pass(&mut server, &mut client)?;
    }
}

fn pass(from: &mut SslStream<TcpStream>, to: &mut SslStream<TcpStream>) -> Option<()> {
    let mut bytes = [0; 16 * 1024];
    match from.read(&mut bytes) {
        Ok(0) => None,
        Ok(n) => to.write_all(bytes.get(..n)?).ok(),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Some(()),
        Err(_) => None,
    }
}

#[test]
fn whoever_stands_between_is_found_out() {
    let world = World::new();
    let forged = Request::new("db.example").name("db.example").sign_itself();
    let port = stand_between(&world, &forged);
    let through =
        |url: String| url.replace(&format!("port={}", world.server.port()), &format!("port={port}"));
    // Nobody has asked who he is, so this is what he can do.
    let mut url = through(
        world.url("by_password", &format!("sslmode=require password={PASSWORD} channel_binding=disable")),
    );
    connect(&url).unwrap();
    for binding in ["prefer", "require"] {
        let text = refused(&url.replace("channel_binding=disable", &format!("channel_binding={binding}")));
        assert!(text.starts_with("AuthFailed"), "{binding}: {text}");
    }
    url = through(world.trusting("verify-ca"));
    let text = refused(&url);
    assert!(text.contains("certificate"), "{text}");
    // With a certificate of the same authority for another host he comes as far as verify-ca goes.
    let other = Request::new("web.example").name("web.example").sign_by(&world.root);
    let port = stand_between(&world, &other);
    let through =
        |url: String| url.replace(&format!("port={}", world.server.port()), &format!("port={port}"));
    connect(&through(world.trusting("verify-ca"))).unwrap();
    refused(&through(world.trusting("verify-full")));
}
