package headwater;

import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;

import io.delta.storage.HadoopFileSystemLogStore;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * How Spark puts an entry into a table's log in S3: by a PUT that the store refuses to a name that is taken. Delta's own
 * looks whether there is an object and then writes one, with a lock that no other process keeps to: of two writers at
 * the same moment both succeed, and what the first one committed is gone.
 *
 * The same as `put_if_absent` of headwater/delta/object_store.py: what is refused, or has no answer, is compared with
 * what is there. The client repeats a request whose answer was lost, and is refused then because of itself; nobody
 * else's entry has the same bytes, since each carries an id of its own.
 * Compiled by Janino, that Spark brings along: Java 8 without lambdas, variable arguments and try-with-resources.
 */
public final class PutLogStore extends HadoopFileSystemLogStore {
    private static final String IF_ABSENT = "fs.option.create.conditional.overwrite";

    public PutLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf)
            throws IOException {
        FileSystem store = path.getFileSystem(hadoopConf);
        byte[] entry = bytesOf(actions);
        if (overwrite.booleanValue()) {
            put(store.create(path, true), entry);
            return;
        }
        try {
            FSDataOutputStreamBuilder builder = store.createFile(path);
            builder.overwrite(false);
            builder.must(IF_ABSENT, "true"); // refused by a connector that does not know it
            put((FSDataOutputStream) builder.build(), entry);
        } catch (IOException refused) {
            byte[] found = read(store, path);
            if (found == null) {
                throw refused;
            }
            if (!Arrays.equals(found, entry)) {
                throw new FileAlreadyExistsException(path.toString());
            }
        }
    }

    private static byte[] bytesOf(Iterator<String> lines) throws IOException {
        ByteArrayOutputStream all = new ByteArrayOutputStream();
        while (lines.hasNext()) {
            all.write((lines.next() + "\n").getBytes(StandardCharsets.UTF_8));
        }
        return all.toByteArray();
    }

    /** The object is there when the stream is closed, so one that was not written whole must not be. */
    private static void put(FSDataOutputStream stream, byte[] content) throws IOException {
        boolean whole = false;
        try {
            stream.write(content);
            whole = true;
        } finally {
            if (whole) {
                stream.close();
            } else {
                stream.abort();
            }
        }
    }

    /** Null: there is none. */
    private static byte[] read(FileSystem store, Path path) throws IOException {
        FSDataInputStream stream;
        try {
            stream = store.open(path);
        } catch (FileNotFoundException none) {
            return null;
        }
        try {
            ByteArrayOutputStream all = new ByteArrayOutputStream();
            byte[] part = new byte[65536];
            int count = stream.read(part);
            while (count >= 0) {
                all.write(part, 0, count);
                count = stream.read(part);
            }
            return all.toByteArray();
        } finally {
            stream.close();
        }
    }

    /** An object is there whole or not at all: checkpoints are written under their names. */
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return Boolean.FALSE;
    }
}
