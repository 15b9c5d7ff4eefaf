//! The client's own deadline: a stream that gives up by itself.
//!
//! The driver has no timeout for a query, and PostgreSQL's own limits end neither a silent network
//! nor a `COMMIT` that waits for a standby. So every TCP connection of ours, encrypted or not, runs
//! through a [`DeadlineStream`] whose reads and writes fail with `TimedOut` once its [`StreamControl`]'s
//! deadline has passed, or at once when another thread kills the control.
//!
//! 1. A killed control stays dead: no byte is read or written through it any more, and dropping the
//!    driver's client returns without waiting.
//! 2. An answer that has already arrived is still read after the deadline; only waiting ends.
//! 3. Between calls no deadline is set: an idle connection does not expire.
//!
//! The driver never hands a Unix socket to a TLS connector, so there only the server's own limits
//! hold.

use std::any::TypeId;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use postgres::NoTls;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};

/// The handle by which a connection's socket is timed out or cut. Cheap to clone.
#[derive(Clone)]
pub(crate) struct StreamControl(Arc<State>);

struct State {
    start: Instant,
    /// Nanoseconds after `start`; `u64::MAX` for none.
    deadline: AtomicU64,
    dead: AtomicBool,
    guards: AtomicBool,
    /// The server said that a commit may not have reached its standby.
    unreplicated: AtomicBool,
    encrypted: AtomicBool,
    waiting: Mutex<Option<Waker>>,
}

impl StreamControl {
    pub(crate) fn new() -> Self {
        Self(Arc::new(State {
            start: Instant::now(),
            deadline: AtomicU64::new(u64::MAX),
            dead: AtomicBool::new(false),
            guards: AtomicBool::new(false),
            unreplicated: AtomicBool::new(false),
            encrypted: AtomicBool::new(false),
            waiting: Mutex::new(None),
        }))
    }

    /// Lets waiting end this much later from now.
    pub(crate) fn limit(&self, wait: Duration) {
        let end = self.0.start.elapsed().saturating_add(wait);
        self.0.deadline.store(u64::try_from(end.as_nanos()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Lets waiting last.
    pub(crate) fn unlimited(&self) {
        self.0.deadline.store(u64::MAX, Ordering::SeqCst);
    }

    /// Cuts the connection, from any thread.
    pub(crate) fn kill(&self) {
        self.0.dead.store(true, Ordering::SeqCst);
        let waker = self.0.waiting.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the socket runs through us: TCP, not a Unix socket.
    pub(crate) fn guards(&self) -> bool {
        self.0.guards.load(Ordering::SeqCst)
    }

    /// Whether what runs through us is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.0.encrypted.load(Ordering::SeqCst)
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.0.dead.load(Ordering::SeqCst)
    }

    /// Remembers a warning that a commit may not have reached its standby.
    pub(crate) fn set_unreplicated(&self) {
        self.0.unreplicated.store(true, Ordering::SeqCst);
    }

    /// Whether that warning came, once.
    pub(crate) fn take_unreplicated(&self) -> bool {
        self.0.unreplicated.swap(false, Ordering::SeqCst)
    }

    fn deadline(&self) -> Option<Instant> {
        match self.0.deadline.load(Ordering::SeqCst) {
            u64::MAX => None,
            nanos => Some(self.0.start + Duration::from_nanos(nanos)),
        }
    }
}

/// A timer at a control's deadline. It is armed lazily: calls follow each other with later and later
/// deadlines, so an early timer is left to fire and is then set anew, instead of on every call.
struct Alarm {
    control: StreamControl,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    fn new(control: StreamControl) -> Self {
        Self { control, sleep: None }
    }

    fn check(&self) -> io::Result<()> {
        if self.control.is_dead() { Err(timed_out("the connection was cut")) } else { Ok(()) }
    }

    /// Called when the socket has to wait: ready with the error once the control is dead or its time
    /// is over; otherwise sees to it that this task is woken then.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        *self.control.0.waiting.lock() = Some(cx.waker().clone());
        // Checked after the waker is in place: a kill in between is seen here or wakes us.
        if let Err(error) = self.check() {
            return Poll::Ready(error);
        }
        let Some(deadline) = self.control.deadline() else { return Poll::Pending };
        if Instant::now() >= deadline {
            return Poll::Ready(timed_out("the time for this call is over"));
        }
        let at = tokio::time::Instant::from_std(deadline);
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
        if sleep.deadline() > at {
            sleep.as_mut().reset(at);
        }
        while sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return Poll::Ready(timed_out("the time for this call is over"));
            }
            sleep.as_mut().reset(at);
        }
        Poll::Pending
    }
}

fn timed_out(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// A socket, encrypted or not, behind a control.
pub(crate) struct DeadlineStream<T> {
    alarm: Alarm,
    inner: MaybeTls<T>,
}

enum MaybeTls<T> {
    Plain(Socket),
    Tls(T),
}

impl<T: TlsStream + Unpin> DeadlineStream<T> {
    fn new(control: StreamControl, inner: MaybeTls<T>) -> Self {
        Self { alarm: Alarm::new(control), inner }
    }

    /// Runs one poll of the stream below under the control's deadline.
    fn guarded<R>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut (dyn AsyncStream + '_)>, &mut Context<'_>) -> Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        self.alarm.check()?;
        let below: &mut dyn AsyncStream = match &mut self.inner {
            MaybeTls::Plain(socket) => socket,
            MaybeTls::Tls(stream) => stream,
        };
        match poll(Pin::new(below), cx) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => Poll::Ready(Err(ready!(self.alarm.poll_over(cx)))),
        }
    }
}

trait AsyncStream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> AsyncStream for S {}

impl<T: TlsStream + Unpin> AsyncRead for DeadlineStream<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get_mut().guarded(cx, |below, cx| below.poll_read(cx, buf))
    }
}

#[expect(
    clippy::redundant_closure_for_method_calls,
    reason = "a method path is not general enough in its lifetime"
)]
impl<T: TlsStream + Unpin> AsyncWrite for DeadlineStream<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().guarded(cx, |below, cx| below.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().guarded(cx, |below, cx| below.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().guarded(cx, |below, cx| below.poll_shutdown(cx))
    }
}

impl<T: TlsStream + Unpin> TlsStream for DeadlineStream<T> {
    fn channel_binding(&self) -> ChannelBinding {
        match &self.inner {
            MaybeTls::Plain(_) => ChannelBinding::none(),
            MaybeTls::Tls(stream) => stream.channel_binding(),
        }
    }
}

/// How a connection is encrypted; what `sslmode` and `sslnegotiation` ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encryption {
    Never,
    IfOffered,
    Required,
    /// TLS from the first byte, PostgreSQL 17 and later.
    Direct,
}

/// Puts a control under the driver: to the driver it is a TLS connector that never refuses, so that it
/// is handed every TCP socket; the caller's own connector runs inside.
#[derive(Clone)]
pub(crate) struct DeadlineTls<T> {
    tls: T,
    encryption: Encryption,
    control: StreamControl,
}

impl<T: 'static> DeadlineTls<T> {
    pub(crate) fn new(tls: T, encryption: Encryption, control: StreamControl) -> Self {
        Self { tls, encryption, control }
    }

    /// Whether the caller's connector is the driver's "no TLS".
    pub(crate) fn is_no_tls() -> bool {
        TypeId::of::<T>() == TypeId::of::<NoTls>()
    }
}

type BoxError = Box<dyn Error + Send + Sync>;

impl<T> MakeTlsConnect<Socket> for DeadlineTls<T>
where
    T: MakeTlsConnect<Socket>,
    T::TlsConnect: Send + 'static,
    T::Stream: Send + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    type Stream = DeadlineStream<T::Stream>;
    type TlsConnect = DeadlineConnect<T::TlsConnect>;
    type Error = BoxError;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, BoxError> {
        self.control.0.guards.store(true, Ordering::SeqCst);
        let tls = match self.encryption {
            Encryption::Never => None,
            _ => Some(self.tls.make_tls_connect(domain).map_err(Into::into)?),
        };
        Ok(DeadlineConnect { tls, encryption: self.encryption, control: self.control.clone() })
    }
}

/// One connection attempt of a [`DeadlineTls`].
pub(crate) struct DeadlineConnect<C> {
    tls: Option<C>,
    encryption: Encryption,
    control: StreamControl,
}

impl<C> TlsConnect<Socket> for DeadlineConnect<C>
where
    C: TlsConnect<Socket> + Send + 'static,
    C::Stream: Send + 'static,
    C::Future: Send,
{
    type Stream = DeadlineStream<C::Stream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, BoxError>> + Send>>;

    fn connect(self, mut socket: Socket) -> Self::Future {
        Box::pin(async move {
            let mut alarm = Alarm::new(self.control.clone());
            let Some(tls) = self.tls else {
                return Ok(DeadlineStream::new(self.control, MaybeTls::Plain(socket)));
            };
            if self.encryption != Encryption::Direct && !offers_tls(&mut socket, &mut alarm).await? {
                if self.encryption == Encryption::Required {
                    return Err("the server does not offer TLS, but sslmode asks for it".into());
                }
                return Ok(DeadlineStream::new(self.control, MaybeTls::Plain(socket)));
            }
            let mut handshake = Box::pin(tls.connect(socket));
            let stream = poll_fn(|cx| match handshake.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(result.map_err(Into::into)),
                Poll::Pending => Poll::Ready(Err(ready!(alarm.poll_over(cx)).into())),
            })
            .await?;
            self.control.0.encrypted.store(true, Ordering::SeqCst);
            Ok(DeadlineStream::new(self.control, MaybeTls::Tls(stream)))
        })
    }
}

/// Asks the server whether it speaks TLS: `SSLRequest`, answered by one byte
/// (<https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SSL>).
async fn offers_tls(socket: &mut Socket, alarm: &mut Alarm) -> io::Result<bool> {
    const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    let mut rest: &[u8] = &SSL_REQUEST;
    while !rest.is_empty() {
        let n = poll_fn(|cx| match Pin::new(&mut *socket).poll_write(cx, rest) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => Poll::Ready(Err(ready!(alarm.poll_over(cx)))),
        })
        .await?;
        rest = rest.get(n..).unwrap_or_default();
    }
    let mut answer = [0_u8];
    let mut buf = ReadBuf::new(&mut answer);
    poll_fn(|cx| match Pin::new(&mut *socket).poll_read(cx, &mut buf) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => Poll::Ready(Err(ready!(alarm.poll_over(cx)))),
    })
    .await?;
    match buf.filled() {
        [] => Err(io::ErrorKind::UnexpectedEof.into()),
        answer => Ok(answer == b"S"),
    }
}
