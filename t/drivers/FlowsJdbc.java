/*
 * The main flows of idem through JDBC; prints TAP.
 *
 *     java -cp postgresql.jar FlowsJdbc.java KEY-PREFIX direct|pooled|unprepared
 *
 * "pooled": through a transaction pooler with two connections to the server;
 * "unprepared": through one that does not know prepared statements. JDBC knows
 * no sockets but TCP's: the server is on 127.0.0.1, its port, database and user
 * are in the environment (PGPORT, PGDATABASE, PGUSER).
 */
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.sql.Types;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import org.postgresql.PGStatement;
import org.postgresql.util.PGInterval;
import org.postgresql.util.PGobject;

public class FlowsJdbc {
    static final String REQUEST = "{\"amount\": 100, \"currency\": \"EUR\"}";
    // a response that no parser of JSON gives back as it was
    static final String RESPONSE = "{\"amount\": 12.00,   \"id\":9007199254740993 }";

    // [README
    record Answer(String outcome, String response) {}

    static Answer pay(Connection connection, String key, String request) throws SQLException {
        connection.setAutoCommit(false);
        try (var claim = connection.prepareStatement("SELECT outcome, response::text FROM idem_claim('payments', ?, ?)");
             var work = connection.prepareStatement("INSERT INTO payment SELECT ?, (?::json->>'amount')::int");
             var complete = connection.prepareStatement("SELECT idem_complete('payments', ?, ?)")) {
            claim.setString(1, key);
            claim.setString(2, request);
            ResultSet found = claim.executeQuery();
            found.next();
            Answer answer = new Answer(found.getString("outcome"), found.getString("response"));
            if (answer.outcome().equals("claimed")) {
                work.setString(1, key);
                work.setString(2, request);
                work.executeUpdate();
                answer = new Answer("claimed", "{\"amount\": 12.00,   \"id\":9007199254740993 }");
                complete.setString(1, key);
                complete.setString(2, answer.response());
                complete.executeQuery();
            }
            connection.commit();        // an error before or in it: roll back, and pay again with the same key
            return answer;
        }
    }
    // README]

    static boolean pooled;
    static boolean prepared;
    static String prefix;
    static int tests;
    static int problems;

    static void ok(boolean passed, String name, String note) {
        System.out.println((passed ? "ok " : "not ok ") + ++tests + " - " + name);
        if (!passed) {
            problems++;
            System.out.println("# " + note);
        }
    }

    static void same(Object got, Object expected, String name) {
        ok(expected.equals(got), name, "got " + got + ", expected " + expected);
    }

    static Connection connect(String options) throws SQLException {
        return DriverManager.getConnection("jdbc:postgresql://127.0.0.1:" + System.getenv("PGPORT") + "/" + System.getenv("PGDATABASE")
            + "?user=" + System.getenv("PGUSER") + "&sslmode=disable" + (prepared ? "" : "&prepareThreshold=0") + options);
    }

    static PreparedStatement bind(PreparedStatement statement, Object... parameters) throws SQLException {
        for (int i = 0; i < parameters.length; i++)
            statement.setObject(i + 1, parameters[i]);
        return statement;
    }

    static ResultSet query(PreparedStatement statement, Object... parameters) throws SQLException {
        ResultSet result = bind(statement, parameters).executeQuery();
        result.next();
        return result;
    }

    static int update(PreparedStatement statement, Object... parameters) throws SQLException {
        return bind(statement, parameters).executeUpdate();
    }

    // The values of the one row that a statement returns, as text.
    static List<String> row(Connection connection, String sql, Object... parameters) throws SQLException {
        try (var statement = connection.prepareStatement(sql)) {
            ResultSet result = query(statement, parameters);
            List<String> values = new ArrayList<>();
            for (int i = 1; i <= result.getMetaData().getColumnCount(); i++)
                values.add(result.getString(i));
            return values;
        }
    }

    static String one(Connection connection, String sql, Object... parameters) throws SQLException {
        return row(connection, sql, parameters).get(0);
    }

    static void run(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    static String outcome(Connection connection, String key, Object request) throws SQLException {
        return one(connection, "SELECT outcome FROM idem_claim('payments', ?, ?)", key, request);
    }

    static String payments(Connection connection, String key) throws SQLException {
        String count = one(connection, "SELECT count(*) FROM payment WHERE key = ?", key);
        if (!connection.getAutoCommit())
            connection.commit();
        return count;
    }

    interface Action { void run() throws SQLException; }

    // The error that an action ends with.
    static String sqlstate(Action action) {
        try {
            action.run();
            return "no error";
        } catch (SQLException error) {
            return error.getSQLState();
        }
    }

    static PGobject typed(String type, String value) throws SQLException {
        PGobject object = new PGobject();
        object.setType(type);
        object.setValue(value);
        return object;
    }

    // --- claim, work, complete, commit; what a retry gets

    static void payment(Connection a, Connection b) throws SQLException {
        String key = prefix + " pay";
        same(pay(a, key, REQUEST), new Answer("claimed", RESPONSE), "first request: claimed");
        same(pay(b, key, REQUEST), new Answer("replayed", RESPONSE), "retry: replayed, byte for byte");
        same(pay(b, key, "{\"currency\":\"EUR\",\"amount\":1e2}"), new Answer("replayed", RESPONSE), "retry, written differently: replayed");
        same(pay(b, key, "{\"amount\": 200}"), new Answer("mismatch", null), "another request: mismatch");
        same(payments(a, key), "1", "one payment was made");
        same(one(a, "SELECT response FROM idem_claim('payments', ?)", key), RESPONSE, "the response as this driver gives json: as it is");
        a.commit();
    }

    static void busy(Connection a, Connection b) throws SQLException {
        String key = prefix + " busy";
        String after = prefix + " after in_progress";
        same(outcome(a, key, REQUEST), "claimed", "a claim that stays open");
        try (var claim = b.prepareStatement("SELECT outcome, retry_after FROM idem_claim('payments', ?, ?)")) {
            ResultSet found = query(claim, key, REQUEST);
            same(found.getString(1), "in_progress", "another connection: in_progress");
            same(found.getObject(2), new PGInterval(0, 0, 0, 0, 0, 1), "with retry_after");
        }
        try (var work = b.prepareStatement("INSERT INTO payment VALUES (?, 0)")) {
            update(work, after);
        }
        b.commit();
        same(payments(b, after), "1", "the transaction that lost goes on");
        a.rollback();
        same(pay(b, key, REQUEST).outcome(), "claimed", "after the rollback: claimed by the other connection");
    }

    // --- lease: claim in one transaction, complete in another

    static final String COMPLETE = "SELECT idem_complete('payments', ?, ?, ?)";

    static long lease(Connection connection, String key, Object length) throws SQLException {
        try (var claim = connection.prepareStatement("SELECT token FROM idem_claim('payments', ?, ?, lease => ?)")) {
            long token = query(claim, key, REQUEST, length).getLong(1);
            connection.commit();
            return token;
        }
    }

    static void leased(Connection a, Connection b) throws SQLException {
        String key = prefix + " lease";
        long token = lease(a, key, new PGInterval("5 minutes"));
        ok(token > 0 && token < 1L << 53, "claim under a lease, its length a PGInterval: the token fits a double", "" + token);
        same(outcome(b, key, REQUEST), "in_progress", "seen from another connection: in_progress");
        b.commit();
        same(sqlstate(() -> one(b, "SELECT idem_complete('payments', ?)", key)), "ID002", "complete without the token: ID002");
        b.rollback();
        same(one(b, COMPLETE, key, RESPONSE, token), "succeeded", "complete with the token, in another connection");
        b.commit();
        same(one(b, COMPLETE, key, RESPONSE, token), "succeeded", "complete again, as if the answer had been lost");
        b.commit();
        same(pay(a, key, REQUEST), new Answer("replayed", RESPONSE), "replayed");
    }

    // --- lease lost: the transaction cannot commit, whatever is done about the error

    static void lost(Connection a, Connection b, String how) throws Exception {
        String key = prefix + " lost, " + how;
        long old = lease(b, key, new PGInterval("0.001 seconds"));
        Thread.sleep(10);
        long token = lease(b, key, new PGInterval("5 minutes"));
        ok(old > 0 && token > old, how + ": a lease that is over, taken over with a higher token", token + " after " + old);
        try (var work = a.prepareStatement("INSERT INTO payment VALUES (?, 100)")) {
            update(work, key);
        }
        Savepoint trap = how.equals("savepoint") ? a.setSavepoint() : null;
        same(sqlstate(() -> one(a, COMPLETE, key, RESPONSE, old)), "ID001", how + ": complete with the old token: ID001");
        if (trap != null)
            a.rollback(trap);
        same(one(a, "SELECT 1"), "1", how + ": the transaction goes on");
        same(sqlstate(a::commit), "ID001", how + ": and COMMIT fails all the same");
        a.rollback();
        same(payments(a, key), "0", how + ": what the lost holder wrote is gone");
        same(one(b, COMPLETE, key, RESPONSE, token), "succeeded", how + ": the new holder completes");
        b.commit();
    }

    // --- a claim that nobody settles

    static void unsettled(Connection a) throws SQLException {
        String key = prefix + " unsettled";
        String once = "SELECT idem_once('payments', ?, ?)";
        same(outcome(a, key, REQUEST), "claimed", "a claim that is never settled");
        same(sqlstate(a::commit), "ID003", "COMMIT: ID003");
        a.rollback();
        a.setAutoCommit(true);
        same(sqlstate(() -> outcome(a, key, REQUEST)), "ID003", "autocommit: ID003");
        same(row(a, "SELECT outcome, state FROM idem_status('payments', ?)", key), Arrays.asList(null, null), "nothing is left of it");
        same(one(a, once, key, REQUEST), "t", "autocommit: idem_once: true");
        same(one(a, once, key, REQUEST), "f", "autocommit: idem_once again: false");
        same(sqlstate(() -> one(a, once, key, "{}")), "ID004", "autocommit: idem_once, another request: ID004");
        a.setAutoCommit(false);
    }

    // --- parameters: of each type that a request may have, and of none

    static void parameters(Connection a) throws SQLException {
        String key = prefix + " types";
        pay(a, key, REQUEST);
        same(outcome(a, key, REQUEST), "replayed", "request by setString, a varchar");
        for (String type : List.of("text", "json", "jsonb"))
            same(outcome(a, key, typed(type, REQUEST)), "replayed", "request as a PGobject, " + type);
        try (var claim = a.prepareStatement("SELECT outcome FROM idem_claim('payments', ?, ?)")) {
            claim.setObject(1, key);
            claim.setObject(2, REQUEST, Types.OTHER);
            ResultSet found = claim.executeQuery();
            found.next();
            same(found.getString(1), "replayed", "request of no type");
            claim.setNull(2, Types.VARCHAR);
            found = claim.executeQuery();
            found.next();
            same(found.getString(1), "replayed", "request NULL");
        }
        same(one(a, "SELECT outcome FROM idem_claim(scope => 'payments', key => ?, request => ?::json, wait => ?::interval)", key, REQUEST, "1 s"),
            "replayed", "named arguments, and strings with a cast");
        same(one(a, "SELECT outcome FROM idem_claim('payments', idem_key(?, ?), ?)", prefix, 7, REQUEST), "claimed", "idem_key of parameters");
        a.rollback();
        try (Connection c = connect("&stringtype=unspecified")) {
            same(one(c, "SELECT outcome FROM idem_claim('payments', ?, ?, wait => ?)", key, REQUEST, "1 s"), "replayed",
                "stringtype=unspecified");
        }
    }

    static void payload(Connection a, Connection b) throws SQLException {
        String key = prefix + " payload";
        byte[] body = new byte[256];
        for (int i = 0; i < 256; i++)
            body[i] = (byte) i;
        same(outcome(a, key, REQUEST), "claimed", "a claim to be settled with everything there is");
        same(one(a, "SELECT idem_fail('payments', ?, ?, status_code => ?, headers => ?, body => ?)",
            key, RESPONSE, 402, typed("jsonb", "{\"a\": \"b\"}"), body), "failed", "fail");
        a.commit();
        try (var claim = b.prepareStatement("SELECT outcome, state, response::text, status_code, headers, body FROM idem_claim('payments', ?, ?)")) {
            ResultSet found = query(claim, key, REQUEST);
            same(List.of(found.getString(1), found.getString(2), found.getString(3), found.getInt(4), found.getString(5)),
                List.of("replayed", "failed", RESPONSE, 402, "{\"a\": \"b\"}"), "replayed: state, response, status, headers");
            ok(Arrays.equals(found.getBytes(6), body), "replayed: body", "it differs");
        }
        b.commit();
    }

    // --- prepared statements, in text and, as this driver does after some executions, in binary

    static void prepared(Connection a) throws SQLException {
        List<String> results = new ArrayList<>();
        try (var claim = a.prepareStatement("SELECT outcome, token FROM idem_claim('payments', ?, ?)");
             var complete = a.prepareStatement("SELECT idem_complete('payments', ?, ?)")) {
            for (int i = 0; i < 10; i++) {
                String key = prefix + " prepared " + i;
                results.add(query(claim, key, REQUEST).getString(1));
                query(complete, key, RESPONSE);
                results.add(query(claim, key, REQUEST).getString(1));
                a.commit();
            }
            same(claim.unwrap(PGStatement.class).isUseServerPrepare(), prepared, prepared ? "prepared on the server" : "not prepared on the server");
        }
        List<String> expected = new ArrayList<>();
        for (int i = 0; i < 10; i++)
            expected.addAll(List.of("claimed", "replayed"));
        same(results, expected, "a PreparedStatement, ten times");

        String key = prefix + " PREPARE";
        run(a, "PREPARE here AS SELECT outcome FROM idem_claim('payments', $1, $2)");
        results = new ArrayList<>(List.of(one(a, "EXECUTE here ('" + key + "', '" + REQUEST + "')")));
        one(a, "SELECT idem_complete('payments', ?)", key);
        for (int i = 0; i < 10; i++)
            results.add(one(a, "EXECUTE here ('" + key + "', '" + REQUEST + "')"));
        run(a, "DEALLOCATE here");
        a.commit();
        expected = new ArrayList<>(Collections.nCopies(10, "replayed"));
        expected.add(0, "claimed");
        same(results, expected, "PREPARE, used and deallocated in one transaction");
    }

    // --- a batch of messages in one round trip, and each once

    static void batch(Connection a) throws SQLException {
        try (var work = a.prepareStatement("INSERT INTO payment SELECT ?, 1 WHERE idem_once('payments', ?)")) {
            for (int i = 0; i < 9; i++)
                bind(work, prefix + " batch", prefix + " message " + i % 3).addBatch();
            same(Arrays.toString(work.executeBatch()), "[1, 1, 1, 0, 0, 0, 0, 0, 0]", "executeBatch with idem_once: each message once");
        }
        a.commit();
        same(payments(a, prefix + " batch"), "3", "three payments were made");
    }

    // --- the whole in one call

    static void call(Connection a, Connection b) throws SQLException {
        String key = prefix + " call";
        String request = "{\"key\": \"" + key + "\", \"amount\": 5}";
        String call = "SELECT outcome, response::text FROM idem_call('payments', ?, ?, 'pay(jsonb)')";
        a.setAutoCommit(true);
        same(row(a, call, key, request), List.of("executed", "{\"paid\": 5}"), "idem_call, in autocommit: executed");
        a.setAutoCommit(false);
        same(row(b, call, key, typed("jsonb", request)), List.of("replayed", "{\"paid\": 5}"), "idem_call: replayed");
        b.commit();
        same(payments(a, key), "1", "idem_call: one payment was made");
    }

    // --- behind a pooler, transactions of one client run in one server process or another

    static void processes(Connection a, Connection b) throws SQLException {
        String key = prefix + " processes";
        String pid = one(a, "SELECT pg_backend_pid()");
        a.commit();
        long token = lease(a, key, new PGInterval("5 minutes"));
        one(b, "SELECT 1");     // a transaction begins; a pooler gives it the process that is free now
        List<String> answer = row(a, "SELECT pg_backend_pid(), idem_complete('payments', ?, ?, ?)", key, RESPONSE, token);
        a.commit();
        b.rollback();
        same(answer.get(1), "succeeded", "completes what was claimed");
        same(!answer.get(0).equals(pid), pooled, pooled ? "in another server process" : "in the same server process");
    }

    // --- a client that goes away

    static void gone(Connection a, Connection b) throws SQLException {
        String key = prefix + " gone";
        same(outcome(a, key, REQUEST), "claimed", "a client that claims and goes away");
        a.abort(Runnable::run);
        same(one(b, "SELECT outcome FROM idem_claim('payments', ?, wait => ?)", key, new PGInterval("10 seconds")), "claimed", "its key is free");
        b.rollback();
    }

    public static void main(String[] args) throws Exception {
        prefix = args[0];
        pooled = !args[1].equals("direct");
        prepared = !args[1].equals("unprepared");
        Connection a = connect("");
        Connection b = connect("");
        a.setAutoCommit(false);
        b.setAutoCommit(false);
        System.out.println("# " + a.getMetaData().getDriverName() + " " + a.getMetaData().getDriverVersion() + ", Java " + System.getProperty("java.version"));

        payment(a, b);
        busy(a, b);
        leased(a, b);
        lost(a, b, "savepoint");
        Connection autosave = connect("&autosave=always");
        autosave.setAutoCommit(false);
        lost(autosave, b, "autosave=always");
        autosave.close();
        unsettled(a);
        parameters(a);
        payload(a, b);
        prepared(a);
        batch(a);
        call(a, b);
        processes(a, b);
        gone(a, b);
        b.close();
        System.out.println("1.." + tests);
        System.exit(problems > 0 ? 1 : 0);
    }
}
