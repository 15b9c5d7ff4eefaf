//! The driver's TLS connector, over whichever library this crate was built with.

use std::error::Error;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};

use crate::error::Result;
use crate::sync::Mutex;
use crate::tls::files::{Files, Stamp};
use crate::tls::options::TlsOptions;

/// The protocol's name within TLS
/// (<https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SSL>).
#[cfg(any(feature = "native-tls", feature = "rustls"))]
pub(crate) const PROTOCOL: &str = "postgresql";

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// What a TLS library has to do.
pub(crate) trait TlsLibrary: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    /// Settings and certificates, for any number of handshakes.
    type Ready: Clone + Send + Sync + 'static;

    fn prepare(options: &TlsOptions, files: &Files) -> Result<Self::Ready>;
    fn handshake(
        ready: Self::Ready,
        server: String,
        socket: Socket,
    ) -> impl Future<Output = Result<Established<Self::Stream>, BoxError>> + Send;
}

/// An encrypted stream, and what the handshake has agreed on.
pub(crate) struct Established<S> {
    pub(crate) stream: S,
    /// `tls-server-end-point` of <https://www.rfc-editor.org/rfc/rfc5929>: the digest of the server's certificate.
    pub(crate) end_point: Option<Vec<u8>>,
    /// Whether the server has said that it speaks PostgreSQL's protocol.
    pub(crate) confirmed: bool,
}

/// A connector for what a connection string asks for. Cheap to clone.
pub(crate) struct UrlTls<L: TlsLibrary>(Arc<Inner<L>>);

struct Inner<L: TlsLibrary> {
    options: TlsOptions,
    ready: Mutex<(Stamp, L::Ready)>,
}

impl<L: TlsLibrary> Clone for UrlTls<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<L: TlsLibrary> UrlTls<L> {
    /// Reads the files.
    pub(crate) fn new(options: TlsOptions) -> Result<Self> {
        let stamp = Stamp::of(&options);
        let ready = L::prepare(&options, &Files::read(&options)?)?;
        Ok(Self(Arc::new(Inner { options, ready: Mutex::new((stamp, ready)) })))
    }

    fn ready(&self) -> L::Ready {
        let options = &self.0.options;
        let stamp = Stamp::of(options);
        let mut ready = self.0.ready.lock();
        if ready.0 != stamp {
            match Files::read(options).and_then(|files| L::prepare(options, &files)) {
                Ok(new) => *ready = (stamp, new),
                // Half-written, perhaps. The next connection looks again.
                Err(error) => log::warn!("changed certificate files cannot be used yet: {}", error.chain()),
            }
        }
        ready.1.clone()
    }
}

impl<L: TlsLibrary> MakeTlsConnect<Socket> for UrlTls<L> {
    type Stream = Encrypted<L::Stream>;
    type TlsConnect = UrlConnect<L>;
    type Error = BoxError;

    fn make_tls_connect(&mut self, server: &str) -> Result<UrlConnect<L>, BoxError> {
        let direct = self.0.options.direct;
        Ok(UrlConnect { ready: self.ready(), server: server.to_owned(), direct })
    }
}

/// One handshake of a [`UrlTls`].
pub(crate) struct UrlConnect<L: TlsLibrary> {
    ready: L::Ready,
    server: String,
    direct: bool,
}

impl<L: TlsLibrary> TlsConnect<Socket> for UrlConnect<L> {
    type Stream = Encrypted<L::Stream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, BoxError>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let established = L::handshake(self.ready, self.server, socket).await?;
            if self.direct && !established.confirmed {
                return Err("the server did not say that it speaks PostgreSQL's protocol, as sslnegotiation=direct needs it to".into());
            }
            Ok(Encrypted { stream: established.stream, end_point: established.end_point })
        })
    }
}

/// An encrypted stream, as the driver wants it.
pub(crate) struct Encrypted<S> {
    stream: S,
    end_point: Option<Vec<u8>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        match &self.end_point {
            Some(digest) => ChannelBinding::tls_server_end_point(digest.clone()),
            None => ChannelBinding::none(),
        }
    }
}

/// Neither feature is on.
#[cfg(not(any(feature = "native-tls", feature = "rustls")))]
pub(crate) struct Missing;

#[cfg(not(any(feature = "native-tls", feature = "rustls")))]
impl TlsLibrary for Missing {
    type Stream = tokio::io::DuplexStream;
    type Ready = ();

    fn prepare(_: &TlsOptions, _: &Files) -> Result<()> {
        Ok(())
    }

    async fn handshake((): (), _: String, _: Socket) -> Result<Established<Self::Stream>, BoxError> {
        Err("there is no TLS library".into())
    }
}
