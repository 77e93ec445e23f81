//! Listens, hands connections on, and ends in order.

use crate::app::App;
use crate::engine::Ended;
use crate::error::{Error, Result};
use crate::routes::{Peer, router};
use crate::served::Served;
use crate::settings::Settings;
use crate::tls;
use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

/// Bytes of a request's head, and of what waits to be written.
const MOST_BUFFERED: usize = 64 << 10;

/// Connections that the system holds until they are accepted.
const MOST_WAITING: u32 = 1024;

/// Time beyond the limit in which connections that are broken off let go of what they have.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A server that listens, and has not begun to answer.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    tls: Option<Tls>,
}

struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// An address that is taken, and certificates that were read, before models are loaded: nobody can connect yet.
#[derive(Debug)]
pub struct Reserved {
    settings: Settings,
    socket: TcpSocket,
    tls: Option<Tls>,
}

impl Reserved {
    /// Listens. Errors: no models or two of one name, an address that somebody else listens on by now.
    ///
    /// # Panics
    ///
    /// Outside of a runtime of tokio.
    pub fn listen(self, models: Vec<Served>) -> Result<Server> {
        let Self { settings, socket, tls } = self;
        let refuse =
            |expected: &str, got: String| Error::Settings { what: "models", expected: expected.to_owned(), got };
        if models.is_empty() {
            return Err(refuse("at least one", "none".to_owned()));
        }
        let twice = (1..models.len()).find(|&at| models[..at].iter().any(|other| other.name == models[at].name));
        if let Some(at) = twice {
            return Err(refuse("a name of its own for each", format!("two of the name {}", models[at].name)));
        }
        let address = settings.address.to_string();
        let listener = socket.listen(MOST_WAITING).map_err(|source| Error::Listen { address, source })?;
        let app = App::new(settings, models.into_iter().map(Arc::new).collect());
        Ok(Server { app, listener, tls })
    }
}

impl Server {
    /// Takes the address. Errors: settings that make no sense, certificates that cannot be used, an address that is not to be had.
    pub fn reserve(settings: Settings) -> Result<Reserved> {
        settings.check()?;
        let tls = settings.tls.as_ref().map(|(chain, key)| tls::acceptor(chain, key)).transpose()?.map(Tls);
        let address = settings.address;
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let bound = socket.and_then(|socket| {
            // Elsewhere this would let two listen on one port.
            #[cfg(unix)]
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok(socket)
        });
        let socket = bound.map_err(|source| Error::Listen { address: address.to_string(), source })?;
        Ok(Reserved { settings, socket, tls })
    }

    /// Listens. Errors: those of [`Server::reserve`] and [`Reserved::listen`].
    pub async fn bind(settings: Settings, models: Vec<Served>) -> Result<Self> {
        Self::reserve(settings)?.listen(models)
    }

    /// Where it listens. Error: the system does not say.
    pub fn address(&self) -> Result<SocketAddr> {
        let address = self.app.settings.address.to_string();
        self.listener.local_addr().map_err(|source| Error::Listen { address, source })
    }

    /// Answers until `stop` is done: then nothing new is begun, what runs has the time that settings say, and models end. How each ended,
    /// by name. Errors: a model that cannot go on, told once all is ended.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<Vec<(String, Ended)>> {
        let Self { app, listener, tls } = self;
        let router = router(app.clone());
        let (end, ended) = watch::channel(());
        let places = Arc::new(Semaphore::new(app.settings.limits.connections));
        tokio::pin!(stop);
        let mut failed = tokio::time::interval(Duration::from_millis(250));
        loop {
            let place = tokio::select! {
                () = &mut stop => break,
                _ = failed.tick() => match app.failed() {
                    Some(_) => break,
                    None => continue,
                },
                place = places.clone().acquire_owned() => place,
            };
            // The semaphore is never closed.
            let Ok(place) = place else { break };
            let accepted = tokio::select! {
                () = &mut stop => break,
                _ = failed.tick() => match app.failed() {
                    Some(_) => break,
                    None => continue,
                },
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(why) => {
                    // Too many open files, or a connection that broke off: the next may do.
                    tracing::warn!("cannot accept a connection: {why}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let of_peer = Connection { router: router.clone(), peer, app: app.clone(), ended: ended.clone() };
            let acceptor = tls.as_ref().map(|Tls(acceptor)| acceptor.clone());
            tokio::spawn(async move {
                of_peer.serve(stream, acceptor).await;
                drop(place);
            });
        }
        drop(listener);
        app.end();
        tracing::info!("ending: {} texts are not done", app.gate.inside());
        drop(ended);
        let _ = end.send(());
        // Connections hold the other end until they are done.
        if tokio::time::timeout(app.settings.limits.drain + LAST_WORDS, end.closed()).await.is_err() {
            tracing::warn!("ending: {} texts are broken off", app.gate.inside());
        }
        finish(app, router).await
    }
}

/// Ends all models. Texts whose readers are gone by now are cancelled; of others, which would hold an engine up, there are none, since the
/// runtime ends the tasks that have them.
async fn finish(app: Arc<App>, router: Router) -> Result<Vec<(String, Ended)>> {
    drop(router);
    app.models.iter().for_each(|served| served.engine.close());
    let of_thread = app.clone();
    let join = move || -> Vec<(String, Ended)> {
        of_thread.models.iter().map(|served| (served.name.clone(), served.engine.join())).collect()
    };
    let ended = tokio::task::spawn_blocking(join).await;
    let ended = ended.map_err(|panic| Error::Model { model: "(all)".to_owned(), why: panic.to_string() })?;
    for (model, Ended { counts, failure }) in &ended {
        tracing::info!(model, pages = counts.pages, free_pages = counts.free_pages, failure, "ended");
    }
    match ended.iter().find_map(|(model, ended)| Some((model.clone(), ended.failure.clone()?))) {
        Some((model, why)) => Err(Error::Model { model, why }),
        None => Ok(ended),
    }
}

/// One connection.
struct Connection {
    router: Router,
    peer: SocketAddr,
    app: Arc<App>,
    ended: watch::Receiver<()>,
}

impl Connection {
    async fn serve(self, stream: TcpStream, tls: Option<TlsAcceptor>) {
        let limits = self.app.settings.limits;
        // Tokens are small and wanted at once.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.write));
        match tls {
            None => self.answer(Box::pin(stream)).await,
            Some(tls) => match tokio::time::timeout(limits.read, tls.accept(Box::pin(stream))).await {
                Ok(Ok(stream)) => self.answer(stream).await,
                Ok(Err(why)) => tracing::debug!("no TLS with {}: {why}", self.peer),
                Err(_) => tracing::debug!("no TLS with {}: too slow", self.peer),
            },
        }
    }

    async fn answer(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let Self { router, peer, app, mut ended } = self;
        let limits = app.settings.limits;
        let service = TowerToHyperService::new(router);
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            hyper::service::Service::call(&service, request)
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.read).max_buf_size(MOST_BUFFERED);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let drain = async {
            // An error says the same: the server ends.
            let _ = ended.changed().await;
        };
        tokio::select! {
            done = connection.as_mut() => return note(peer, done),
            () = drain => connection.as_mut().graceful_shutdown(),
        }
        // What is not done then is broken off.
        match tokio::time::timeout(limits.drain, connection.as_mut()).await {
            Ok(done) => note(peer, done),
            Err(_) => tracing::warn!("a request of {peer} is broken off"),
        }
        drop(ended);
    }
}

fn note(peer: SocketAddr, done: hyper::Result<()>) {
    if let Err(why) = done {
        tracing::debug!("connection with {peer}: {why}");
    }
}
